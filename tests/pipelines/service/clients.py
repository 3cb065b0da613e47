"""Requests to a front, honest ones and others."""

from __future__ import annotations

import hashlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipelines.service.http_app import Answer, Call
from pipelines.service.http_front import Front, listening
from pipelines.service.order import StepOrder

RUN = "a" * 32
TRAIN = "POST /v1/steps/0/train HTTP/1.1"
MAX_BODY_BYTES = 2**20


def address(front: Front) -> tuple[str, int]:
    """Host and port."""
    host, _, port = front.url.removeprefix("http://").partition(":")
    return host, int(port)


def head(front: Front, line: str = TRAIN, body: bytes = b"", **changed: str | None) -> str:
    """The head of an honest request; ``changed``: headers, with ``_`` for ``-``, ``None`` to leave one out."""
    headers: dict[str, str | None] = {
        "Host": front.url.removeprefix("http://"),
        "Authorization": f"Bearer {front.token}",
        "Content-Type": "application/octet-stream",
        "Content-Length": str(len(body)),
        "Run-Id": RUN,
        "Content-SHA256": hashlib.sha256(body).hexdigest(),
    }
    headers |= {name.replace("_", "-"): value for name, value in changed.items()}
    lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    return "\r\n".join([line, *lines, "", ""])


def ask(front: Front, text: str, body: bytes = b"") -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of the answer to a head and the body after it."""
    with socket.create_connection(address(front), timeout=60.0) as connection:
        connection.sendall(text.encode("latin-1") + body)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}


def train(front: Front, body: bytes = b"hello", *, line: str = TRAIN, **changed: str | None) -> tuple[int, bytes]:
    """Status and body of the answer to a request with datums."""
    return ask(front, head(front, line, body, **changed), body)[:2]


@dataclass(kw_only=True, slots=True)
class Carried:
    """The calls that a front's main thread answered."""

    calls: list[Call] = field(default_factory=list)


@contextmanager
def answered(
    front: Front, answer: Callable[[Call], Answer] | None = None, *, carried: Carried | None = None
) -> Iterator[Carried]:
    """Answer a front's calls in the block, as the main thread of a service does: with the size of the body."""
    carried = carried or Carried()

    def run() -> None:
        while (call := front.calls.get()).operation != "finish" or call.request is not None or call.body != b"stop":
            carried.calls.append(call)
            known = None if call.request is None else front.order.admit(call.request)
            result = known or (answer or _answer_size)(call)
            if call.request is not None and result.status == 200:
                front.order.record(call.request, result)
            call.answer(result)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield carried
    finally:
        front.calls.put(Call(operation="finish", body=b"stop"))
        thread.join()


def _answer_size(call: Call) -> Answer:
    return Answer.json({"bytes": len(call.body)})


@contextmanager
def listening_front(
    *, max_steps: int = 3, score_names: tuple[str, ...] = (), max_body_bytes: int = MAX_BODY_BYTES
) -> Iterator[Front]:
    """A front on a free port of the loopback."""
    order: StepOrder[Answer] = StepOrder(max_steps=max_steps, score_names=score_names)
    with listening("127.0.0.1", 0, order=order, max_body_bytes=max_body_bytes) as front:
        yield front
