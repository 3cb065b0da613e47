"""The file of a running training service: ``service.json`` has its URL, its process and the token of every request.

Contract: only the owner can read it, from its first moment on, and it appears whole. Nobody else gets the token from
this code: no message, log or representation has it. A service that was killed leaves its file; ``has_ended`` tells.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from mock_scheduler.errors import ServiceError
from mock_scheduler.support.files import encode_json, publish_new
from mock_scheduler.support.processes import is_alive
from mock_scheduler.support.run_files import SERVICE_FILE
from mock_scheduler.support.text import shorten

_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
_MAX_BYTES = 16 * 2**10
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_LOOPBACK = re.compile(r"http://(127(\.[0-9]{1,3}){3}|localhost|\[::1\])(:[0-9]+)?")


def make_token() -> str:
    """Make the token of one service: 32 random bytes as text."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceAccess:
    """Holds the way to a service.

    ``process_id``: the service's on its own machine, ``None`` where unknown. ``source``: the origin of the token, for
    messages.
    """

    url: str
    token: str = field(repr=False)
    source: str
    process_id: int | None = None

    def has_ended(self) -> bool:
        """Whether the service was a process of this machine, and runs no more."""
        is_here = _LOOPBACK.fullmatch(self.url) is not None
        return is_here and self.process_id is not None and not is_alive(self.process_id)


@contextmanager
def published(path: Path, *, url: str, token: str) -> Iterator[None]:
    """Have the file of this process's service there in the block, whatever ends it but SIGKILL and a crash.

    In the main thread only. Raises ``FileExistsError`` where there is a file.
    """
    handled = {which: signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGHUP)}
    is_there = False
    came_early: list[int] = []

    def remove(which: int, _frame: FrameType | None) -> None:
        if not is_there:  # half written: neither it nor its name aside may be left
            came_early.append(which)
            return
        path.unlink(missing_ok=True)
        end_by(which)

    def end_by(which: int) -> None:
        # The end is that of the signal itself: the launcher tells ended ranks from failed ones by it.
        signal.signal(which, signal.SIG_DFL)
        os.kill(os.getpid(), which)

    try:
        # Before there is a file: whoever waits for it may end the service at once.
        for which, handler in handled.items():
            if handler == signal.SIG_DFL:
                signal.signal(which, remove)
        try:
            write_service_file(path, url=url, token=token)
            is_there = True
        finally:
            if came_early:
                if is_there:
                    path.unlink(missing_ok=True)
                end_by(came_early[0])
        yield
    finally:
        if is_there:
            path.unlink(missing_ok=True)
        for which, handler in handled.items():
            signal.signal(which, handler)


def write_service_file(path: Path, *, url: str, token: str) -> None:
    """Write the file of this process's service; raises ``FileExistsError`` where there is one."""
    content = {"url": url, "process_id": os.getpid(), "token": token}
    publish_new(path, encode_json(content), mode=stat.S_IRUSR | stat.S_IWUSR)


def read_service_file(path: Path, *, url: str) -> ServiceAccess:
    """Read the file of a service. ``url``: the service that the user named.

    Raises ``ServiceError`` where it is absent, readable by others, no such file, or that of another service.
    """
    content = _load(path)
    token, found, process_id = (content.get(name) for name in ("token", "url", "process_id"))
    if not isinstance(token, str) or not _TOKEN.fullmatch(token) or not _is_process_id(process_id):
        raise ServiceError(f"{path} is no file of a training service: it needs a url, a process_id and a token")
    if found != url:
        raise ServiceError(
            f"{path} is that of the service at {shorten(ascii(found), 80)}, and training_service.url is {url}: name "
            "the file of that service by training_service.service_file, or give its token by "
            "training_service.token_variable"
        )
    return ServiceAccess(url=url, token=token, source=str(path), process_id=process_id)


def take_token(name: str, environ: Mapping[str, str], *, url: str) -> ServiceAccess:
    """Take the token from a variable of the environment; raises ``ServiceError`` where it has none."""
    token = environ.get(name)
    if token is None or not _TOKEN.fullmatch(token):
        found = "not set" if token is None else "no token of a training service"
        raise ServiceError(
            f"the variable {name} (training_service.token_variable) is {found}; it takes the token in the "
            f"{SERVICE_FILE} of the service"
        )
    return ServiceAccess(url=url, token=token, source=f"the variable {name}")


def _is_process_id(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


def _load(path: Path) -> dict[str, Any]:
    try:
        # Neither a link nor a pipe that never answers; a service makes neither.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ServiceError(
            f"{path} cannot be read: {os.strerror(error.errno or 0)}; a training service has this file in its "
            "output_dir while it is ready. Is it running? Name another place by training_service.service_file"
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ServiceError(f"{path} is no regular file, and so not that of a training service")
        if status.st_mode & _OTHERS:
            raise ServiceError(
                f"{path} has the rights {stat.S_IMODE(status.st_mode):04o}: others may have its token. Start the "
                f"service anew, or where the file is a copy of your own, run: chmod 600 {path}"
            )
        data = os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):  # no cause: its text has a part of the file
        raise ServiceError(f"{path} is no file of a training service: it is not JSON") from None
    if not isinstance(content, dict):
        raise ServiceError(f"{path} is no file of a training service: it is no JSON object")
    return content
