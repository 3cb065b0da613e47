"""The HTTP side of a training service: turns requests into calls that the main thread answers one at a time.

Contract: a connection that sends nothing, slowly or wrongly keeps nobody else waiting, and does not keep the service
from ending; an answer that is due is sent before it ends.
"""

from __future__ import annotations

import json
import queue
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mock_scheduler.errors import ConfigError
from mock_scheduler.remote.protocol import MAX_REQUEST_BYTES
from mock_scheduler.support.digests import JSON

_POLL_S = 0.2
_SILENCE_S = 60.0  # of a connection, in the middle of its request or of reading its answer
_LAST_ANSWERS_S = 10.0  # for answers that are being sent when the service ends
_CHUNK_BYTES = 1 << 20
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
                # Whether it has ended is asked first: what was answered before the end is there by then.
                if ended.is_set() and self._answers.empty():
                    return Answer.json({"error": "the service has ended"}, status=503)


class _RequestError(Exception):
    """A request that cannot be read: its status and what is wrong."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """One connection; ``server`` is a ``_Server``."""

    timeout = _SILENCE_S
    server: _Server  # HTTP/1.0, the base's own: a connection ends with its answer, and so can the service

    def do_GET(self) -> None:
        self._answer(get=True)

    def do_POST(self) -> None:
        self._answer(get=False)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are in the run's own log."""

    def _answer(self, *, get: bool) -> None:
        try:
            call = self._read_call(get=get)
        except _RequestError as error:
            self._reply(Answer.json({"error": str(error)}, status=error.status))
            return
        with self.server.replying():
            self.server.calls.put(call)
            self._reply(call.wait(self.server.ended))

    def _read_call(self, *, get: bool) -> Call:
        step_path = _STEP_PATH.fullmatch(self.path)
        if get and self.path == "/v1/service":
            return Call(operation="service")
        if not get and step_path is not None:
            return Call(operation=step_path[2], step=int(step_path[1]), body=self._read_body())
        if not get and self.path == "/v1/finish":
            return Call(operation="finish")
        raise _RequestError(404, f"there is no {self.command} {self.path}")

    def _read_body(self) -> bytes:
        """The body, of just the length that is announced; it takes memory as it arrives."""
        text = self.headers.get("Content-Length")
        if text is None:
            raise _RequestError(411, "Content-Length is missing; chunked bodies are not read")
        if not text.isascii() or not text.isdigit() or len(text) > 20:
            raise _RequestError(400, f"Content-Length is {text[:40]!r}, expected a whole number")
        size = int(text)
        if size > MAX_REQUEST_BYTES:
            raise _RequestError(413, f"{size} bytes are more than {MAX_REQUEST_BYTES}")
        body = bytearray()
        while len(body) < size:
            chunk = self.rfile.read(min(_CHUNK_BYTES, size - len(body)))
            if not chunk:
                raise _RequestError(400, f"the body ends after {len(body)} of {size} bytes")
            body += chunk
        return bytes(body)

    def _reply(self, answer: Answer) -> None:
        is_json = answer.body[:1] == b"{"
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json" if is_json else "application/octet-stream")
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a connection that is stuck ends with the process

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _Handler)
        self.calls: queue.Queue[Call] = queue.Queue()
        self.ended = threading.Event()
        self._num_replying = 0
        self._replied = threading.Condition()

    @contextmanager
    def replying(self) -> Iterator[None]:
        """The block waits for an answer and sends it."""
        with self._replied:
            self._num_replying += 1
        try:
            yield
        finally:
            with self._replied:
                self._num_replying -= 1
                self._replied.notify_all()

    def wait_for_replies(self) -> None:
        """Until every answer that is due was sent, but not for ever."""
        with self._replied:
            self._replied.wait_for(lambda: self._num_replying == 0, timeout=_LAST_ANSWERS_S)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as the base has it
        """A client that went away is its own affair; anything else is a fault, and the base prints it."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """A server that listens. ``url``: where; ``calls``: what comes in."""

    url: str
    calls: queue.Queue[Call]


@contextmanager
def listening(host: str, port: int) -> Iterator[Front]:
    """Listen in the block; port 0 takes a free one. Raises ``ConfigError`` where the address cannot be had."""
    try:
        server = _Server((host, port))
    except OSError as error:
        raise ConfigError(
            f"training_service.host {host} and port {port} cannot be listened at: {error.strerror or error}; port=0 "
            "takes a free one"
        ) from error
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield Front(url=f"http://{host}:{server.server_address[1]}", calls=server.calls)
        finally:
            server.ended.set()
            server.wait_for_replies()
            server.shutdown()
            thread.join()
