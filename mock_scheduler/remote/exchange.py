"""Sends one request to a training service and reads its answer; repeats it where the connection fails.

Contract: no proxy, no redirect, no compression. An answer takes no more memory than was allowed, and the whole request,
repeats included, no longer than ``timeout_s``. Every failure is a ``ServiceError``. Safe from any thread, also where an
event loop is running.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass, field
from functools import partial

import httpx
from anyio.from_thread import start_blocking_portal

from mock_scheduler.errors import ServiceError
from mock_scheduler.remote.service_file import ServiceAccess
from mock_scheduler.support.text import shorten

#: Too slow a body, and a busy service: the same request may be carried out later.
_BUSY = (408, 503)
_GONE = 410
_PATIENCE_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_MAX_ERROR_BYTES = 64 * 2**10

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Holds status and body."""

    status: int
    body: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request to carry out once, however often it is sent.

    ``max_answer_bytes``: a longer answer is refused. ``ends_service``: the service ends with its answer, so nobody may
    be left to repeat it.
    """

    method: str
    path: str
    headers: dict[str, str] = field(repr=False)
    body: bytes = field(default=b"", repr=False)
    max_answer_bytes: int
    ends_service: bool = False


def exchange(access: ServiceAccess, request: Request, *, timeout_s: float) -> Answer | None:
    """Send a request until it is answered.

    Returns the answer; ``None`` where the request ended the service, and its answer was lost.
    Raises ``ServiceError`` where no answer came, or one that cannot be read.
    """
    # An event loop, since only there a deadline ends a request in whatever state it is.
    with start_blocking_portal() as portal:
        return portal.call(partial(_Exchange(access, request, timeout_s).run))


class _Exchange:
    def __init__(self, access: ServiceAccess, request: Request, timeout_s: float) -> None:
        self._access = access
        self._request = request
        self._timeout_s = timeout_s
        self._place = f"{access.url}{request.path}"
        self._problem = ""  # the last one
        self._failing_since_s: float | None = None

    async def run(self) -> Answer | None:
        # trust_env=False: a proxy of the environment is not for a service of this machine. The deadline is that of the
        # whole request, so httpx has none of its own.
        client = httpx.AsyncClient(
            trust_env=False,
            timeout=None,
            limits=httpx.Limits(max_keepalive_connections=0),
            verify=self._access.url.startswith("https:"),  # else the list of authorities would be read for nothing
        )
        try:
            async with asyncio.timeout(self._timeout_s), client:
                return await self._repeat(client)
        except TimeoutError as error:
            problem = f"{self._problem}; it " if self._problem else "it "
            raise self._no_answer(
                f"{problem}did not come within {self._timeout_s:g} s (training_service.timeout_s)"
            ) from error

    async def _repeat(self, client: httpx.AsyncClient) -> Answer | None:
        was_sent = False
        pause_s = _FIRST_PAUSE_S
        while True:
            began_s = time.monotonic()
            try:
                answer = await self._ask(client)
            except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
                raise self._no_answer(str(error)) from error
            except httpx.ConnectError as error:
                if was_sent and self._request.ends_service:
                    return None
                self._note(str(error) or type(error).__name__, began_s)
                self._check_running()
            except httpx.TransportError as error:
                was_sent = True
                self._note(str(error) or type(error).__name__, began_s)
            else:
                if was_sent and self._request.ends_service and answer.status == _GONE:
                    return None
                if answer.status not in _BUSY:
                    return answer
                self._note(f"{error_text(answer.body)} (status {answer.status})", began_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _note(self, problem: str, began_s: float) -> None:
        """Keep the problem of an attempt; raise where patience is over. An attempt that went on begins it anew."""
        self._problem = problem
        now_s = time.monotonic()
        if self._failing_since_s is None or now_s - began_s > _LONGEST_PAUSE_S:
            self._failing_since_s = now_s
            logger.warning("%s: %s; trying again", self._place, problem)
        if now_s - self._failing_since_s > _PATIENCE_S:
            raise self._no_answer(f"{problem}, for {_PATIENCE_S:g} s")

    def _check_running(self) -> None:
        """Raise where nobody listens and the service's process has ended.

        Alone the number says little: in another container the same process has another one.
        """
        if self._access.has_ended():
            raise self._no_answer(
                f"{self._problem}. The service, process {self._access.process_id} of {self._access.source}, has ended; "
                "where it was killed, its file is left: remove it"
            )

    async def _ask(self, client: httpx.AsyncClient) -> Answer:
        request, token = self._request, self._access.token
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity", **request.headers}
        async with client.stream(request.method, self._place, content=request.body, headers=headers) as answer:
            encoding = answer.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                raise ServiceError(f"{self._place}: the answer is compressed ({encoding!a}), which nobody asked for")
            limit = request.max_answer_bytes if answer.status_code == 200 else _MAX_ERROR_BYTES
            body = bytearray()
            async for chunk in answer.aiter_raw():
                body += chunk
                if len(body) > limit:
                    raise ServiceError(f"{self._place}: the answer is longer than {limit:,} bytes")
            return Answer(status=answer.status_code, body=bytes(body))

    def _no_answer(self, problem: str) -> ServiceError:
        return ServiceError(
            f"{self._place}: no answer: {problem}. Is the service still running? Its run.log or terminal says why it "
            "ended"
        )


def error_text(body: bytes) -> str:
    """The text of an error's document, or else the beginning of the body; printable characters and new lines alone."""
    try:
        text = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return shorten(repr(body), 200)
    return "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in str(text))
