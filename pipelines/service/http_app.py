"""The HTTP side of a training service turns requests into calls; the main thread answers them one at a time.

Contract: nothing of a request's body is read before its token, its step, its run and its length are known to be good,
and one body at a time is. A silent, slow or wrong client keeps nobody else waiting, and does not keep the service from
ending; a given answer is sent before it ends. Every request has a deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import queue
import re
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mock_scheduler.remote.protocol import DIGEST_HEADER, MEDIA_TYPE, RUN_HEADER
from mock_scheduler.support.digests import JSON
from pipelines.service.access import Access, Connection
from pipelines.service.order import Operation, OutOfOrderError, StepOrder, StepRequest

# A request, and an answer, may take this long, and a second more for each of so many bytes.
_TRANSFER_S = 20.0
_SLOWEST_BYTES_PER_S = 2**20
_PATHS = (("GET", "/v1/service"), ("POST", "/v1/finish"))
_STEP_PATH = re.compile(r"/v1/steps/([0-9]{1,9})/(score|train)")
_RUN_ID = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Holds an answer to a client: JSON, or a document's bytes."""

    status: int
    body: bytes

    @classmethod
    def json(cls, content: JSON, *, status: int = 200) -> Answer:
        """Make an answer in JSON."""
        return cls(status=status, body=json.dumps(content, allow_nan=False).encode())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """Holds one request for the main thread. ``request``, ``body``: of ``score`` and ``train``."""

    operation: Literal["service", "score", "train", "finish"]
    request: StepRequest | None = None
    body: bytes = b""
    answered: Future[Answer] = field(default_factory=Future)

    def answer(self, answer: Answer) -> None:
        """Send an answer back; a second one, or one for a client that is gone, is dropped."""
        with suppress(InvalidStateError):
            self.answered.set_result(answer)


_ENDED = Answer.json({"error": "the service has ended"}, status=HTTPStatus.GONE)
_AGAIN = "another request is being read or carried out; try again"


class _RequestError(Exception):
    """A request that cannot be carried out: its status and the problem."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


@dataclass(kw_only=True, slots=True, eq=False)
class _Turn:
    """The request whose body is read or carried out; ``call``: once the body was read."""

    request: StepRequest
    connection: Connection
    call: Call | None = None


class App:
    """Is the ASGI application; it runs on the server's event loop, in a thread of its own.

    ``calls``: of its clients, for the main thread.
    """

    def __init__(self, access: Access, order: StepOrder[Answer], *, max_body_bytes: int) -> None:
        self.calls: queue.Queue[Call] = queue.Queue()
        self._access = access
        self._order = order
        self._max_body_bytes = max_body_bytes
        self._lock = threading.Lock()
        self._has_ended = False
        self._waiting: set[Call] = set()
        self._turn: _Turn | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        connection: Connection = scope["state"]["connection"]
        connection.stop_clock()
        try:
            answer = await self._answer(Request(scope, receive), connection)
        except _RequestError as error:
            answer = Answer.json({"error": str(error)}, status=error.status)
        except ClientDisconnect:  # in the middle of its request: nobody waits for an answer
            return
        # The rest of a known client's body is waited for as long as the body would have been.
        unread = _announced_bytes(scope) if connection.is_admitted and not connection.is_read else 0
        try:
            async with asyncio.timeout(_seconds_for(len(answer.body) + min(unread, self._max_body_bytes))):
                await _send(answer, connection, scope, receive, send)
        except TimeoutError:
            connection.abort()
            while (await receive())["type"] != "http.disconnect":  # else uvicorn would log an error of ours
                pass

    def end(self) -> None:
        """Answer each waiting client that the service has ended; any thread may call it."""
        with self._lock:
            self._has_ended = True
            waiting = set(self._waiting)
        for call in waiting:
            call.answer(_ENDED)  # dropped where the call has its answer already

    async def _answer(self, request: Request, connection: Connection) -> Answer:
        refusal = self._access.refuse(request.headers)
        if refusal is not None:
            raise _RequestError(refusal, refusal.phrase)
        connection.admit()
        # As it was sent: decoded, ``%2f`` would be a second name of every path.
        method, path = request.method, request.scope["raw_path"].decode("ascii")
        step_path = _STEP_PATH.fullmatch(path)
        is_known = (method, path) in _PATHS or (method == "POST" and step_path is not None)
        if not is_known or request.scope["query_string"]:
            raise _RequestError(HTTPStatus.NOT_FOUND, f"there is no {method} {path}")
        if method == "GET":
            return await self._ask(Call(operation="service"), connection)
        run_id = self._read_head(request)
        try:
            if step_path is None:
                self._order.check_run(run_id)
                return await self._ask(Call(operation="finish"), connection)
            operation: Operation = "score" if step_path[2] == "score" else "train"
            digest = _header(request, DIGEST_HEADER, _DIGEST)
            wanted = StepRequest(operation=operation, step=int(step_path[1]), run_id=run_id, digest=digest)
            return self._order.admit(wanted) or await self._carry_out(wanted, request, connection)
        except OutOfOrderError as error:
            raise _RequestError(HTTPStatus.CONFLICT, str(error)) from error

    def _read_head(self, request: Request) -> str:
        """Check what every POST has; returns its run."""
        if request.headers.getlist("content-type") != [MEDIA_TYPE]:
            raise _RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type must be {MEDIA_TYPE}")
        size = _announced_bytes(request.scope)
        if "content-length" not in request.headers or "transfer-encoding" in request.headers:
            raise _RequestError(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing; chunked bodies are not read")
        if size > self._max_body_bytes:
            raise _RequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"{size} bytes are more than {self._max_body_bytes}, which follow from rollout_batch_size and "
                "sequence_length; where the batch has large columns of its own, set "
                "training_service.max_request_bytes of the service",
            )
        return _header(request, RUN_HEADER, _RUN_ID)

    async def _carry_out(self, wanted: StepRequest, request: Request, connection: Connection) -> Answer:
        turn = self._turn
        if turn is not None and turn.request != wanted:
            raise _RequestError(HTTPStatus.SERVICE_UNAVAILABLE, _AGAIN)
        if turn is not None and turn.call is not None:
            # The very request: its client has lost the connection on which it was sent first.
            return await asyncio.shield(asyncio.wrap_future(turn.call.answered))
        if turn is not None:
            turn.connection.abort()
        self._turn = turn = _Turn(request=wanted, connection=connection)
        try:
            body = await self._read_body(request, wanted.digest, connection)
            if self._turn is not turn:
                raise _RequestError(HTTPStatus.SERVICE_UNAVAILABLE, _AGAIN)
            turn.call = Call(operation=wanted.operation, request=wanted, body=body)
            return await self._ask(turn.call, connection)
        finally:
            if self._turn is turn:
                self._turn = None

    async def _ask(self, call: Call, connection: Connection) -> Answer:
        connection.is_read = True
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

    async def _read_body(self, request: Request, digest: str, connection: Connection) -> bytes:
        """Read a body; it takes memory as it arrives, not as it is announced."""
        size = _announced_bytes(request.scope)
        limit_s = _seconds_for(size)
        body, found = bytearray(), hashlib.sha256()
        try:
            async with asyncio.timeout(limit_s):
                async for chunk in request.stream():
                    body += chunk
                    found.update(chunk)
        except TimeoutError as error:
            problem = f"{len(body)} of the body's {size} bytes came within {limit_s:g} s"
            raise _RequestError(HTTPStatus.REQUEST_TIMEOUT, problem) from error
        connection.is_read = True
        if found.hexdigest() != digest:
            raise _RequestError(HTTPStatus.BAD_REQUEST, f"the body is not that of its {DIGEST_HEADER}")
        return bytes(body)


def _header(request: Request, name: str, pattern: re.Pattern[str]) -> str:
    values = request.headers.getlist(name)
    if len(values) != 1 or not pattern.fullmatch(values[0]):
        raise _RequestError(HTTPStatus.BAD_REQUEST, f"the header {name} must be {pattern.pattern}")
    return values[0]


def _announced_bytes(scope: Scope) -> int:
    return int(Headers(scope=scope).get("content-length", "0"))  # h11 has refused one that is no number


def _seconds_for(size_bytes: int) -> float:
    return _TRANSFER_S + size_bytes / _SLOWEST_BYTES_PER_S


async def _send(answer: Answer, connection: Connection, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an answer, then drop the rest of the request's body, then close the connection.

    Closed before, it would be reset, and the client could lose the answer.
    """

    async def send_open(message: Message) -> None:
        is_body = message["type"] == "http.response.body"
        await send({**message, "more_body": True} if is_body else message)

    is_json = answer.body[:1] == b"{"
    media_type = "application/json" if is_json else MEDIA_TYPE
    headers = {"Connection": "close"}
    if answer.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    await Response(answer.body, answer.status, headers=headers, media_type=media_type)(scope, receive, send_open)
    if not connection.is_read:
        is_announced = "content-length" in Headers(scope=scope)
        connection.drop_body(_announced_bytes(scope) if is_announced else math.inf)
    while not connection.is_read:
        connection.is_read = (await receive())["type"] == "http.disconnect" or connection.is_read
    await send({"type": "http.response.body", "body": b"", "more_body": False})
