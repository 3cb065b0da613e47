"""The HTTP side of a training service: turns requests into calls that the main thread answers one at a time."""

from __future__ import annotations

import json
import queue
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from mock_scheduler.digests import JSON
from mock_scheduler.remote.protocol import MAX_REQUEST_BYTES

_POLL_S = 0.2
_STEP_PATH = re.compile(r"/v1/steps/(\d{1,9})/(score|train)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What goes back: JSON, or a document's bytes."""

    status: int
    body: bytes

    @classmethod
    def json(cls, content: JSON, *, status: int = 200) -> Answer:
        """An answer in JSON."""
        return cls(status=status, body=json.dumps(content, allow_nan=False).encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request. operation: ``service``, ``score``, ``train`` or ``finish``."""

    operation: str
    step: int = 0
    body: bytes = b""
    _answers: queue.Queue[Answer] = field(default_factory=lambda: queue.Queue(maxsize=1))

    def answer(self, answer: Answer) -> None:
        """Send it back."""
        self._answers.put(answer)

    def wait(self, ended: threading.Event) -> Answer:
        """Wait until it was answered, or until the service has ended without."""
        while True:
            try:
                return self._answers.get(timeout=_POLL_S)
            except queue.Empty:
                if ended.is_set():
                    return Answer.json({"error": "the service has ended"}, status=503)


class _Handler(BaseHTTPRequestHandler):
    """One connection; ``server`` is a ``_Server``."""

    server: _Server  # HTTP/1.0, the base's own: a connection ends with its answer, and so can the service

    def do_GET(self) -> None:
        self._reply(self._dispatch(get=True))

    def do_POST(self) -> None:
        self._reply(self._dispatch(get=False))

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are in the run's own log."""

    def _dispatch(self, *, get: bool) -> Answer:
        size = int(self.headers.get("Content-Length") or 0)
        if size > MAX_REQUEST_BYTES:
            return Answer.json({"error": f"{size} bytes are more than {MAX_REQUEST_BYTES}"}, status=400)
        body = self.rfile.read(size)
        step_path = _STEP_PATH.fullmatch(self.path)
        if get and self.path == "/v1/service":
            call = Call(operation="service")
        elif not get and step_path is not None:
            call = Call(operation=step_path[2], step=int(step_path[1]), body=body)
        elif not get and self.path == "/v1/finish":
            call = Call(operation="finish")
        else:
            return Answer.json({"error": f"there is no {self.command} {self.path}"}, status=404)
        self.server.calls.put(call)
        return call.wait(self.server.ended)

    def _reply(self, answer: Answer) -> None:
        is_json = answer.body[:1] == b"{"
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json" if is_json else "application/octet-stream")
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # the last answer is sent before the process ends

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _Handler)
        self.calls: queue.Queue[Call] = queue.Queue()
        self.ended = threading.Event()


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """A server that listens. ``url``: where; ``calls``: what comes in."""

    url: str
    calls: queue.Queue[Call]


@contextmanager
def listening(host: str, port: int) -> Iterator[Front]:
    """Listen in the block; port 0 takes a free one. Raises ``OSError`` where the address cannot be had."""
    with _Server((host, port)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield Front(url=f"http://{host}:{server.server_address[1]}", calls=server.calls)
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
