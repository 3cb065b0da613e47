"""Makes read-only bytes of others, as of a store that processes share, memory that this process may write to.

Contract: nobody else ever sees a write. Shared memory of Linux is not copied: the kernel maps its pages a second time,
for this process alone, and copies a page when it is first written to. All other bytes are copied.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
import threading
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# Below this a copy takes less time than a mapping; looking for it takes as long as copying more.
_LEAST_MAPPED = 256 * 1024
_LEAST_LOOKED_FOR = 2 * 1024 * 1024
# A line of /proc/self/maps: shared memory of a file, by its addresses, offset, device and inode.
_SHARED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) r[w-][x-]s ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) ([1-9][0-9]*)", re.M)
_MAP_FAILED = ctypes.c_void_p(-1).value


def own_memory(contents: Sequence[Bytes]) -> list[Bytes]:
    """Returns bytes that may be written to: those that may be already as they are, and all others anew."""
    foreign = [content for content in contents if not content.flags.writeable]
    shared: list[_Shared] = []
    if sum(content.nbytes for content in foreign) >= _LEAST_LOOKED_FOR and sys.platform == "linux":
        with suppress(OSError):  # no /proc
            shared = _list_shared()
    return [content if content.flags.writeable else _as_own(content, shared) for content in contents]


@dataclass(frozen=True, slots=True)
class _Shared:
    """Shared memory from ``start`` to ``stop``: a file, by device and inode, from ``offset`` on."""

    start: int
    stop: int
    offset: int
    key: tuple[int, int]


class _Region:
    """Pages mapped for this process alone. ``source``: keeps the memory that they show from being used for others."""

    def __init__(self, start: int, size: int, *, address: int, source: Bytes) -> None:
        self.__array_interface__ = {**source.__array_interface__, "data": (address, False)}
        self._end = weakref.finalize(self, _unmap, start, size, source)
        self._end.atexit = False  # a tensor may outlive it there


def _as_own(content: Bytes, shared: Sequence[_Shared]) -> Bytes:
    start, stop = content.ctypes.data, content.ctypes.data + content.nbytes
    if content.nbytes >= _LEAST_MAPPED and content.flags.c_contiguous:
        for one in shared:
            if one.start <= start and stop <= one.stop:
                with suppress(OSError):  # no file, pages of another size, or too many mappings
                    return _map_again(content, one, {other.key for other in shared})
    return content.copy()


def _map_again(content: Bytes, shared: _Shared, mapped: Collection[tuple[int, int]]) -> Bytes:
    """The bytes in a mapping of their own. Raises ``OSError``."""
    offset = shared.offset + content.ctypes.data - shared.start
    before = offset % mmap.ALLOCATIONGRANULARITY
    size = before + content.nbytes
    descriptor = _files().open(shared.key, mapped)
    try:
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        start = _libc().mmap(None, size, rights, mmap.MAP_PRIVATE, descriptor, offset - before)
    finally:
        os.close(descriptor)
    if start == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    return np.asarray(_Region(start, size, address=start + before, source=content))


def _list_shared() -> list[_Shared]:
    with open("/proc/self/maps", "rb") as maps:
        found = _SHARED.findall(maps.read())
    numbers = [[int(number, 16) for number in line[:5]] + [int(line[5])] for line in found]
    return [
        _Shared(start, stop, offset, (os.makedev(major, minor), inode))
        for start, stop, offset, major, minor, inode in numbers
    ]


class _Files:
    """The files of shared memory, which this process may have closed once they were mapped, as Ray does.

    A process of this user that has one open lends it: the store's own. A file is looked for once.
    """

    def __init__(self) -> None:
        self._descriptors: dict[tuple[int, int], int | None] = {}
        self._lock = threading.Lock()

    def open(self, key: tuple[int, int], mapped: Collection[tuple[int, int]]) -> int:
        """A new descriptor. ``mapped``: all that are mapped still. Raises ``OSError`` where nobody lends the file."""
        with self._lock:
            if key not in self._descriptors:
                # An open file keeps its memory, so one whose store is gone is closed.
                for gone in self._descriptors.keys() - mapped:
                    self._close(self._descriptors.pop(gone))
                self._descriptors[key] = _borrow(key)
            kept = self._descriptors[key]
            if kept is None:
                raise OSError("nobody has the file open")
            descriptor = os.dup(kept)
        if _key_of(os.fstat(descriptor)) != key:  # the program has closed it, and its number is another file's
            os.close(descriptor)
            raise OSError("the file was closed")
        return descriptor

    @staticmethod
    def _close(descriptor: int | None) -> None:
        if descriptor is not None:
            os.close(descriptor)


def _borrow(key: tuple[int, int]) -> int | None:
    """A descriptor of a file that a process of this user has open; None where none has."""
    others = [name for name in os.listdir("/proc") if name.isdigit()]
    for process in ("self", str(os.getppid()), *others):
        with suppress(OSError):  # it has ended, or is another user's
            for name in os.listdir(f"/proc/{process}/fd"):
                path = f"/proc/{process}/fd/{name}"
                with suppress(OSError):  # closed meanwhile, as that of the listing itself
                    if _key_of(os.stat(path)) == key:
                        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                        if _key_of(os.fstat(descriptor)) == key:
                            return descriptor
                        os.close(descriptor)
    return None


def _key_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


@lru_cache(maxsize=1)
def _files() -> _Files:
    return _Files()


@lru_cache(maxsize=1)
def _libc() -> Any:  # noqa: ANN401 - functions by name
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *numbers)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def _unmap(start: int, size: int, _source: Bytes) -> None:
    _libc().munmap(start, size)
