"""Who may speak to a service: a program that has the token, and no web page.

A browser of this machine reaches the loopback too, for any page that it shows. It names itself by headers that a page
cannot leave out, and a page of another name that leads here (DNS rebinding) has another ``Host``.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.datastructures import Headers

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
    """The ``Host`` headers of requests to a service.

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
