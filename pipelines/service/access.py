"""Who may speak to a service: a program that has the token, and no web page; over few connections with little time.

A browser of this machine reaches the loopback too, for any page that it shows. It names itself by headers that a page
cannot leave out, and a page of another name that leads here (DNS rebinding) has another ``Host``.

uvicorn bounds neither the time of a connection on which nothing comes nor, but by refusing honest ones too, their
number. Contract: at most ``MAX_CONNECTIONS`` are open, each for one request. One more takes the place of the oldest
that has not shown the token, so strangers keep nobody out. Of what a stranger sends, a head of ``MAX_HEAD_BYTES`` is
parsed, and as much after it: chunks of one byte each kept a client waiting for half a minute.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """The token of every request, and the ``Host`` headers that name this service; ``None`` allows each."""

    token: str = field(repr=False)
    hosts: frozenset[str] | None

    def refuse(self, headers: Headers) -> HTTPStatus | None:
        """Return the status of a refusal, or ``None`` for a request that may go on."""
        if any(name == "origin" or name.startswith("sec-fetch-") for name in headers):
            return HTTPStatus.FORBIDDEN
        found = headers.getlist("host")
        if len(found) != 1 or (self.hosts is not None and found[0].lower() not in self.hosts):
            return HTTPStatus.FORBIDDEN
        tokens = headers.getlist("authorization")
        expected = f"Bearer {self.token}".encode()
        if len(tokens) != 1 or not hmac.compare_digest(tokens[0].encode("latin-1"), expected):
            return HTTPStatus.UNAUTHORIZED
        return None


def is_loopback(address: str) -> bool:
    """Whether only programs of this machine reach an address, as a socket gives it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_hosts(host: str, address: str, port: int) -> frozenset[str] | None:
    """Returns the ``Host`` headers of requests to a service.

    Args:
        host: the address that the user named.
        address: the address of the listening socket; of the loopback, or one for others too.
        port: the listening socket's.
    """
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        return None  # every address of the machine, and every name of it
    own = _LOOPBACK_NAMES if is_loopback(address) else ()
    return frozenset(f"{name}:{port}".lower() for name in (*own, bracketed(host), bracketed(address)))


def bracketed(host: str) -> str:
    """An address as a URL has it: an IPv6 one in brackets."""
    return f"[{host}]" if ":" in host else host


MAX_CONNECTIONS = 256
#: For the head of a request.
_HEAD_S = 10.0
#: Of one head, and of each read before the token was shown; an honest head has some 500.
MAX_HEAD_BYTES = 4096
_READ_BYTES = 256 * 2**10  # asyncio's own


class Connection(H11Protocol):
    """One connection. The application finds it in the scope of its request, as ``state["connection"]``."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        self._opened_s = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        self._unwanted: float | None = None  # bytes still to drop; infinite where the client did not say
        #: Its request has the token.
        self.is_admitted = False
        #: Its request was read to the end, so only its answer is left.
        self.is_read = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Start the time for the head of the request, and make room."""
        super().connection_made(transport)
        self._opened_s = self.loop.time()
        self._read_at_once(MAX_HEAD_BYTES)
        self._deadline = self.loop.call_later(_HEAD_S, self.abort)
        others = [other for other in self.connections if isinstance(other, Connection) and not other.is_closing()]
        if len(others) > MAX_CONNECTIONS:
            min((other for other in others if not other.is_admitted), key=lambda other: other._opened_s).abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self.stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, or drop them where nobody wants them."""
        if self._unwanted is None:
            super().data_received(data)
            return
        self._unwanted -= len(data)
        if self._unwanted <= 0:
            self.is_read = True
            self.cycle.message_event.set()

    def admit(self) -> None:
        """Its request has the token: its body may come quickly."""
        self.is_admitted = True
        self._read_at_once(_READ_BYTES)

    def drop_body(self, announced_bytes: float) -> None:
        """Parse no more of the request; it is read once so many bytes of its body were dropped."""
        self.is_read = self.is_read or not self.cycle.more_body
        self._unwanted = announced_bytes - len(self.cycle.body)
        self._read_at_once(_READ_BYTES)

    def _read_at_once(self, size_bytes: int) -> None:
        self.transport.max_size = size_bytes  # type: ignore[attr-defined]  # of asyncio's transports over sockets

    def stop_clock(self) -> None:
        """The head was read: the application sees to the rest."""
        if self._deadline is not None:
            self._deadline.cancel()

    def is_closing(self) -> bool:
        """Whether it is closed, or will be at once."""
        return self.transport.is_closing()

    def abort(self) -> None:
        """Close it without an answer."""
        self.transport.abort()
