"""Listens for the clients of a training service: a socket, a token, and uvicorn's server in a thread of its own."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn

from mock_scheduler.errors import ConfigError
from mock_scheduler.remote.service_file import make_token
from pipelines.service.access import MAX_HEAD_BYTES, Access, Connection, bracketed, own_hosts
from pipelines.service.http_app import Answer, App, Call
from pipelines.service.order import StepOrder

_BACKLOG = 1024
# asyncio takes so many of them at once, before the first is counted: with all that wait, a burst of strangers would
# leave the process without descriptors for its own files.
_TAKEN_AT_ONCE = 64
_LAST_ANSWERS_S = 10  # for answers on their way when the service ends


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """Holds a listening server.

    ``url``: its address; ``address``: its socket's; ``calls``: the calls of its clients; ``order``: of their steps;
    ``token``: of every request.
    """

    url: str
    token: str = field(repr=False)
    address: str
    calls: queue.Queue[Call]
    order: StepOrder[Answer]


@contextmanager
def listening(host: str, port: int, *, order: StepOrder[Answer], max_body_bytes: int) -> Iterator[Front]:
    """Listen in the block; port 0 takes a free one. Raises ``ConfigError`` where the address cannot be had."""
    token = make_token()
    with _bind(host, port) as listener:
        address, own_port = listener.getsockname()[:2]
        access = Access(token=token, hosts=own_hosts(host, address, own_port))
        app = App(access, order, max_body_bytes=max_body_bytes)
        server = _Server(_server_config(app))
        thread = threading.Thread(target=server.run, args=([listener],), name="training-service", daemon=True)
        thread.start()
        try:
            url = f"http://{bracketed(host)}:{own_port}"
            yield Front(url=url, token=token, address=address, calls=app.calls, order=order)
        finally:
            app.end()
            server.should_exit = True
            thread.join()


class _Server(uvicorn.Server):
    """uvicorn's server, which at its end waits for no client in the middle of a request."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin; as many clients may wait as ever, though few are taken at once."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; answers on their way are sent."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection) and not connection.is_read:
                connection.abort()
        await super().shutdown(sockets)


def _server_config(app: App) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,  # the run's own logging, which has the errors of the server too
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=_TAKEN_AT_ONCE,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
    )


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # Listening from now on: a client that comes before the server's thread is ready waits for it.
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        problem = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
        raise ConfigError(
            f"training_service.host {host} and port {port} cannot be listened at: {problem}; port=0 takes a free one"
        ) from error
