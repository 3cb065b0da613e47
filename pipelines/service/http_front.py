"""The HTTP side of a training service turns requests into calls; the main thread answers them one at a time.

Contract: a silent, slow or wrong client keeps nobody else waiting, and does not keep the service from ending; a given
answer is sent before it ends. A body is read only up to its announced length, of at most ``MAX_REQUEST_BYTES``.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mock_scheduler.errors import ConfigError
from mock_scheduler.remote import MAX_REQUEST_BYTES
from mock_scheduler.support.digests import JSON

_SILENCE_S = 60.0  # of a client in the middle of its request
_LAST_ANSWERS_S = 10  # for answers on their way when the service ends
_STEP_PATH = re.compile(r"/v1/steps/(\d{1,9})/(score|train)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer to a client: JSON, or a document's bytes."""

    status: int
    body: bytes

    @classmethod
    def json(cls, content: JSON, *, status: int = 200) -> Answer:
        """Make an answer in JSON."""
        return cls(status=status, body=json.dumps(content, allow_nan=False).encode())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One request. operation: ``service``, ``score``, ``train`` or ``finish``."""

    operation: str
    step: int = 0
    body: bytes = b""
    answered: Future[Answer] = field(default_factory=Future)

    def answer(self, answer: Answer) -> None:
        """Send an answer back; a second one, or one for a client that is gone, is dropped."""
        with suppress(InvalidStateError):
            self.answered.set_result(answer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """A listening server. ``url``: its address; ``calls``: the calls of its clients."""

    url: str
    calls: queue.Queue[Call]


_ENDED = Answer.json({"error": "the service has ended"}, status=503)


class _RequestError(Exception):
    """A request that cannot be read: its status and the problem."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class _App:
    """The ASGI application; it runs on the server's event loop, in a thread of its own."""

    def __init__(self) -> None:
        self.calls: queue.Queue[Call] = queue.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._has_ended = False
        self._waiting: set[Call] = set()
        self._reading: set[asyncio.Timeout] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        self._loop = asyncio.get_running_loop()
        try:
            answer = await self._ask(await self._read_call(Request(scope, receive)))
        except _RequestError as error:
            answer = Answer.json({"error": str(error)}, status=error.status)
        except ClientDisconnect:  # in the middle of its request: nobody waits for an answer
            return
        is_json = answer.body[:1] == b"{"
        media_type = "application/json" if is_json else "application/octet-stream"
        await Response(answer.body, answer.status, media_type=media_type)(scope, receive, send)

    def end(self) -> None:
        """Answer each waiting client that the service has ended, and stop reading; any thread may call it."""
        with self._lock:
            self._has_ended = True
            waiting = set(self._waiting)
        for call in waiting:
            call.answer(_ENDED)  # dropped where the call has its answer already
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop_reading)

    def _stop_reading(self) -> None:
        for silence in self._reading:
            silence.reschedule(0.0)

    async def _ask(self, call: Call) -> Answer:
        with self._lock:
            if self._has_ended:
                return _ENDED
            self._waiting.add(call)
            self.calls.put(call)
        try:
            return await asyncio.wrap_future(call.answered)
        finally:
            with self._lock:
                self._waiting.discard(call)

    async def _read_call(self, request: Request) -> Call:
        path = request.url.path
        step_path = _STEP_PATH.fullmatch(path)
        match request.method, path:
            case "GET", "/v1/service":
                return Call(operation="service")
            case "POST", "/v1/finish":
                return Call(operation="finish")
            case "POST", _ if step_path is not None:
                body = await self._read_body(request)
                return Call(operation=step_path[2], step=int(step_path[1]), body=body)
        raise _RequestError(404, f"there is no {request.method} {path}")

    async def _read_body(self, request: Request) -> bytes:
        """Read a body of the announced length; it takes memory as it arrives, not as it is announced."""
        text = request.headers.get("Content-Length")  # h11 has refused one that is no number
        if text is None:
            raise _RequestError(411, "Content-Length is missing; chunked bodies are not read")
        if int(text) > MAX_REQUEST_BYTES:
            raise _RequestError(413, f"{text} bytes are more than {MAX_REQUEST_BYTES}")
        body = bytearray()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_SILENCE_S) as silence:
                self._reading.add(silence)
                try:
                    async for chunk in request.stream():
                        body += chunk
                        silence.reschedule(loop.time() + _SILENCE_S)
                finally:
                    self._reading.discard(silence)
        except TimeoutError as error:
            problem = f"the body ends after {len(body)} of {text} bytes: no more came for {_SILENCE_S:g} s"
            raise _RequestError(400, problem) from error
        return bytes(body)


@contextmanager
def listening(host: str, port: int) -> Iterator[Front]:
    """Listen in the block; port 0 takes a free one. Raises ``ConfigError`` where the address cannot be had."""
    app = _App()
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,  # the run's own logging, which has the errors of the server too
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
    )
    server = uvicorn.Server(config)
    with _bind(host, port) as listener:
        url = f"http://{host}:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, args=([listener],), name="training-service", daemon=True)
        thread.start()
        try:
            yield Front(url=url, calls=app.calls)
        finally:
            app.end()
            server.should_exit = True
            thread.join()


def _bind(host: str, port: int) -> socket.socket:
    try:
        # Listening from now on: a client that comes before the server's thread is ready waits for it.
        return socket.create_server((host, port))
    except OSError as error:
        problem = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
        raise ConfigError(
            f"training_service.host {host} and port {port} cannot be listened at: {problem}; port=0 takes a free one"
        ) from error
