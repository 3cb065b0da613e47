"""Keeps objects of buckets on this node's disk, each fetched once for all processes of the node.

Contract: a kept object is whole, and of the version that was asked for, so it is never stale. Of several processes that
want one, one fetches it while the others wait. Objects used longest ago are removed where there would be more than the
limit; whoever has one open keeps it. ``MOCK_SCHEDULER_NODE_CACHE`` names the folder, which should be on a disk of the
node (else one in its folder of temporary files), and ``MOCK_SCHEDULER_NODE_CACHE_GIB`` the limit (16); of 0, nothing is
kept. The folder is this user's alone: its files are believed as far as the store's are.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from mock_scheduler.errors import ConfigError, ForeignFileError
from mock_scheduler.support.object_stores import StoredObject

T = TypeVar("T")

FOLDER_VARIABLE = "MOCK_SCHEDULER_NODE_CACHE"
LIMIT_VARIABLE = "MOCK_SCHEDULER_NODE_CACHE_GIB"
_LIMIT_GIB = 16.0
#: Locks are shared by objects, so that none has to be removed: that could part two processes that wait for one.
_NUM_LOCKS = 256
_NUM_TRIES = 8
#: Of a file that is being fetched the last bytes came no longer ago.
_LONGEST_FETCH_S = 24 * 3600


def find_limit() -> int:
    """Returns how many bytes are kept at most; raises ``ConfigError`` where the environment says no number."""
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    try:
        gib = float(text) if text else _LIMIT_GIB
    except ValueError:
        gib = math.nan
    if not 0 <= gib < math.inf:
        raise ConfigError(f"{LIMIT_VARIABLE}={text!r}: expected how many GiB are kept on this node, 0 or more")
    return int(gib * 2**30)


def find_folder() -> Path:
    """Makes and returns the folder of this node and user.

    Raises:
        ForeignFileError: It is another user's, or others may write to it.
        OSError: It cannot be made.
    """
    named = os.environ.get(FOLDER_VARIABLE, "").strip()
    folder = Path(named) if named else Path(tempfile.gettempdir()) / f"mock_scheduler-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat() if named else folder.lstat()
    # A folder of temporary files is everybody's: another user may have been there first.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ForeignFileError(
            f"{folder} is not a folder that this user alone may write to; name another one by {FOLDER_VARIABLE}"
        )
    return folder


class NodeCache:
    """Gives objects as local files.

    Args:
        folder: Of this node, made by ``find_folder``.
        limit_bytes: Kept at most, but for what is in use.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes

    def use(self, wanted: StoredObject, fetch: Callable[[Path], None], take: Callable[[Path], T]) -> T:
        """Gives the file of an object to ``take``, such as to be opened or linked to, and returns its answer.

        Args:
            wanted: The object. One whose store says no version is fetched anew.
            fetch: Writes the object into a new file.
            take: Raises ``FileNotFoundError`` where the file has been removed meanwhile; it is then fetched again.

        Raises:
            OSError: The folder cannot be written to, the object is not as large as ``wanted`` says, or as ``fetch``.
        """
        key = hashlib.sha256(repr((wanted.url, wanted.size_bytes, wanted.version)).encode()).hexdigest()
        path = self._folder / "objects" / key
        path.parent.mkdir(exist_ok=True)
        for attempt in range(_NUM_TRIES):
            with self._locked(f"lock-{int(key[:8], 16) % _NUM_LOCKS:03d}"):
                if attempt or not wanted.version or not self._is_there(path, wanted.size_bytes):
                    self._fetch(path, wanted, fetch)
            with suppress(FileNotFoundError):
                return take(path)
        raise FileNotFoundError(f"{path} was removed {_NUM_TRIES} times while it was used: is {self._folder} emptied?")

    def _is_there(self, path: Path, size_bytes: int) -> bool:
        try:
            os.utime(path)  # used now
            return path.stat().st_size == size_bytes
        except FileNotFoundError:
            return False

    def _fetch(self, path: Path, wanted: StoredObject, fetch: Callable[[Path], None]) -> None:
        with self._locked("lock-room"):
            self._make_room(wanted.size_bytes)
        # Under its lock nobody else writes it; what a killed process left of it is written over.
        aside = path.with_name(f".{path.name}.tmp")
        aside.unlink(missing_ok=True)
        try:
            fetch(aside)
            found = aside.stat().st_size
            if found != wanted.size_bytes:
                raise OSError(f"{wanted.url}: {found} of {wanted.size_bytes} bytes came: it was changed meanwhile")
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def _make_room(self, size_bytes: int) -> None:
        """Removes the objects used longest ago, until another one has room; and what a killed process left."""
        found = []
        for entry in os.scandir(self._folder / "objects"):
            with suppress(FileNotFoundError):
                status = entry.stat()
                found.append((status.st_mtime, status.st_size, Path(entry.path)))
        total, left_s = sum(size for _, size, _ in found) + size_bytes, time.time() - _LONGEST_FETCH_S
        for used_s, size, path in sorted(found):
            is_fetched = not path.name.startswith(".")
            if (is_fetched and total > self._limit_bytes) or (not is_fetched and used_s < left_s):
                path.unlink(missing_ok=True)
                total -= size

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Keeps other processes and threads out; the lock ends with the process, however it ends."""
        descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
