"""Keeps objects of buckets on this node's disk, each fetched once for all processes of the node.

Contract: a kept object is whole, and of the version that was asked for, so it is never stale. Of several processes that
want one, one fetches it while the others wait. After a start of the machine all are fetched again. Objects used longest
ago are removed where there would be more than the limit; whoever has one open keeps it. ``MOCK_SCHEDULER_NODE_CACHE``
names the folder, which should be on a disk of the node (else one in its folder of temporary files), and
``MOCK_SCHEDULER_NODE_CACHE_GIB`` the limit (16); of 0, nothing is kept. The folder is this user's alone: its files are
believed as far as the store's are.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import math
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from mock_scheduler.errors import ConfigError, ForeignFileError
from mock_scheduler.support.files import Buffer
from mock_scheduler.support.foreign_files import open_foreign, read_text
from mock_scheduler.support.object_stores import StoredObject

T = TypeVar("T")
Fetch = Callable[[int, int], Buffer]
"""Requests bytes ``start`` to ``stop`` of an object; fewer, where the object has fewer now."""

FOLDER_VARIABLE = "MOCK_SCHEDULER_NODE_CACHE"
LIMIT_VARIABLE = "MOCK_SCHEDULER_NODE_CACHE_GIB"
_LIMIT_GIB = 16.0
#: Locks are shared by objects, so that none has to be removed: that could part two processes that wait for one.
_NUM_LOCKS = 256
_NUM_TRIES = 8
_MAX_NOTE_BYTES = 64
#: Of the limit, made free at once: the kept objects are looked through so much less often than one is fetched.
_ROOM = 0.1
#: Of a file that is being fetched the last bytes came no longer ago.
_LONGEST_FETCH_S = 24 * 3600


@functools.cache
def _find_boot() -> str:
    """Says since which start of the machine: nothing waits for the disk, so what was kept before may not be whole."""
    with suppress(OSError):
        return read_text("/proc/sys/kernel/random/boot_id")
    return ""


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


def open_cache() -> NodeCache | None:
    """Opens the cache of this node; ``None`` where nothing is to be kept.

    Raises ``ConfigError`` where its folder cannot be made, ``ForeignFileError`` where it is another user's.
    """
    limit_bytes = find_limit()
    if not limit_bytes:
        return None
    try:
        return NodeCache(find_folder(), limit_bytes=limit_bytes)
    except ForeignFileError:
        raise
    except OSError as error:
        raise ConfigError(f"{error}; name another one by {FOLDER_VARIABLE}, or set {LIMIT_VARIABLE}=0") from error


def _read_range(path: Path, start: int, stop: int) -> memoryview:
    data = bytearray(stop - start)
    with open_foreign(path) as stream:
        stream.seek(start)
        num_read = stream.readinto(data)
    return memoryview(data)[:num_read]


class NodeCache:
    """Gives objects as local files.

    Args:
        folder: Of this node, made by ``find_folder``.
        limit_bytes: Kept at most, but for what is in use.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder = folder
        self.limit_bytes = limit_bytes

    def use(self, wanted: StoredObject, fetch: Callable[[Path], None], take: Callable[[Path], T]) -> T:
        """Gives the file of an object to ``take``, such as to be opened or linked to, and returns its answer.

        Args:
            wanted: The object. One whose store says no version is fetched anew.
            fetch: Writes the object into a new file.
            take: Raises ``FileNotFoundError`` where the file has been removed meanwhile; it is then fetched again.

        Raises:
            OSError: The folder cannot be written to, the object is not as large as ``wanted`` says, or as ``fetch``.
        """
        path = self._place(wanted)
        path.parent.mkdir(exist_ok=True)
        for attempt in range(_NUM_TRIES):
            with self._locked(f"lock-{int(path.name[:8], 16) % _NUM_LOCKS:03d}"):
                if attempt or not wanted.version or not self._is_there(path, wanted.size_bytes):
                    self._fetch(path, wanted, fetch)
            with suppress(FileNotFoundError):
                return take(path)
        raise FileNotFoundError(f"{path} was removed {_NUM_TRIES} times while it was used: is {self._folder} emptied?")

    def read(self, wanted: StoredObject, start: int, stop: int, fetch: Fetch) -> memoryview:
        """Reads bytes ``start`` to ``stop`` of an object, out of the whole one or kept by themselves; writable.

        Raises as ``use``, and what ``fetch`` raises.
        """
        whole = self._place(wanted)
        if wanted.version and self._is_there(whole, wanted.size_bytes):
            with suppress(FileNotFoundError):
                return _read_range(whole, start, stop)

        def fetch_range(aside: Path) -> None:
            aside.write_bytes(fetch(start, stop))

        part = replace(wanted, url=f"{wanted.url}#{start}-{stop}", size_bytes=stop - start)
        return self.use(part, fetch_range, lambda path: _read_range(path, 0, stop - start))

    def _place(self, wanted: StoredObject) -> Path:
        kind = (wanted.url, wanted.size_bytes, wanted.version, _find_boot())
        return self._folder / "objects" / hashlib.sha256(repr(kind).encode()).hexdigest()

    def _is_there(self, path: Path, size_bytes: int) -> bool:
        try:
            os.utime(path)  # used now
            return path.stat().st_size == size_bytes
        except FileNotFoundError:
            return False

    def _fetch(self, path: Path, wanted: StoredObject, fetch: Callable[[Path], None]) -> None:
        self._take_room(wanted.size_bytes)
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

    def _take_room(self, size_bytes: int) -> None:
        """Notes that an object comes, in the file that says how much room is left of which limit."""
        with self._locked("lock-room") as descriptor:
            noted = [int(word) for word in os.pread(descriptor, _MAX_NOTE_BYTES, 0).split() if word.isdigit()]
            limit_bytes, left_bytes = noted if len(noted) == 2 else (-1, 0)
            if limit_bytes != self.limit_bytes or left_bytes < size_bytes:
                left_bytes = self._make_room(size_bytes)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{self.limit_bytes} {left_bytes - size_bytes}".encode(), 0)

    def _make_room(self, size_bytes: int) -> int:
        """Removes the objects used longest ago, until others have room, and what a killed process left.

        Returns how much room there is.
        """
        found = []
        for entry in os.scandir(self._folder / "objects"):
            with suppress(FileNotFoundError):
                status = entry.stat()
                found.append((status.st_mtime, status.st_size, Path(entry.path)))
        total, left_s = sum(size for _, size, _ in found), time.time() - _LONGEST_FETCH_S
        wanted_bytes = size_bytes if total + size_bytes <= self.limit_bytes else int(_ROOM * self.limit_bytes)
        most = self.limit_bytes - max(size_bytes, wanted_bytes)
        for used_s, size, path in sorted(found):
            is_fetched = not path.name.startswith(".")
            if (is_fetched and total > most) or (not is_fetched and used_s < left_s):
                path.unlink(missing_ok=True)
                total -= size
        return self.limit_bytes - total

    @contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        """Keeps other processes and threads out, and gives the lock's file; the process that ends gives it back."""
        descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)
