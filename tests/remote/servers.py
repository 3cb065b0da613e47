"""Servers on the loopback that answer as no training service should."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedIOBase
from typing import TypeAlias

#: Writes an answer: head, body, or anything else.
Script: TypeAlias = Callable[[BufferedIOBase], None]


@dataclass(kw_only=True, slots=True)
class Seen:
    """The requests of a server's clients: method and path, and headers by name in small letters."""

    url: str
    lines: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


@contextmanager
def answering(*answers: bytes | Script) -> Iterator[Seen]:
    """Answer one request after another, the last answer again and again; bytes are a whole answer with its head."""
    seen = Seen(url="")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.lines.append(f"{self.command} {self.path}")
            seen.headers.append({name.lower(): value for name, value in self.headers.items()})
            seen.bodies.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            _write(self.wfile, answers, len(seen.lines))
            self.close_connection = True

        do_POST = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            """Silent."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        seen.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield seen
        finally:
            server.shutdown()
            thread.join()


def _write(file: BufferedIOBase, answers: Sequence[bytes | Script], number: int) -> None:
    answer = answers[min(number, len(answers)) - 1]
    try:
        if callable(answer):
            answer(file)
        else:
            file.write(answer)
        file.flush()
    except OSError:  # the client has had enough
        return


def whole(body: bytes, *, status: str = "200 OK", headers: str = "") -> bytes:
    """A whole answer."""
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body
