"""The connections of a service: few, each for one request, and each with little time.

uvicorn bounds neither the time of a connection on which nothing comes nor, but by refusing honest ones too, their
number. Contract: at most ``MAX_CONNECTIONS`` are open. One more takes the place of the oldest that has not shown the
token, so strangers keep nobody out.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MAX_CONNECTIONS = 256
#: For the head of a request.
_HEAD_S = 10.0


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
        #: Its request has the token.
        self.is_admitted = False
        #: Its request was read to the end, so only its answer is left.
        self.is_read = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Start the time for the head of the request, and make room."""
        super().connection_made(transport)
        self._opened_s = self.loop.time()
        self._deadline = self.loop.call_later(_HEAD_S, self.abort)
        others = [other for other in self.connections if isinstance(other, Connection) and not other.is_closing()]
        if len(others) > MAX_CONNECTIONS:
            min((other for other in others if not other.is_admitted), key=lambda other: other._opened_s).abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self.stop_clock()
        super().connection_lost(exc)

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
