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
import weakref
from collections.abc import Sequence
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
    files: list[_SharedFile] = []
    if sum(content.nbytes for content in foreign) >= _LEAST_LOOKED_FOR and sys.platform == "linux":
        with suppress(OSError):  # no /proc
            files = _find_shared_files()
    return [content if content.flags.writeable else _as_own(content, files) for content in contents]


@dataclass(frozen=True, slots=True)
class _SharedFile:
    """Shared memory from ``start`` to ``stop``: a file, by device and inode, from ``offset`` on."""

    start: int
    stop: int
    offset: int
    key: tuple[int, int]
    descriptor: int


class _Region:
    """Pages mapped for this process alone. ``source``: keeps the memory that they show from being used for others."""

    def __init__(self, start: int, size: int, *, address: int, source: Bytes) -> None:
        self.__array_interface__ = {**source.__array_interface__, "data": (address, False)}
        self._end = weakref.finalize(self, _unmap, start, size, source)
        self._end.atexit = False  # a tensor may outlive it there


def _as_own(content: Bytes, files: Sequence[_SharedFile]) -> Bytes:
    start, stop = content.ctypes.data, content.ctypes.data + content.nbytes
    if content.nbytes >= _LEAST_MAPPED and content.flags.c_contiguous:
        for file in files:
            if file.start <= start and stop <= file.stop:
                with suppress(OSError):  # pages of another size, or too many mappings
                    return _map_again(content, file)
    return content.copy()


def _map_again(content: Bytes, file: _SharedFile) -> Bytes:
    """The bytes in a mapping of their own. Raises ``OSError``."""
    offset = file.offset + content.ctypes.data - file.start
    before = offset % mmap.ALLOCATIONGRANULARITY
    size = before + content.nbytes
    descriptor = os.dup(file.descriptor)  # whose number may be another file's by now
    try:
        if _key_of(descriptor) != file.key:
            raise OSError("the file was closed")
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        start = _libc().mmap(None, size, rights, mmap.MAP_PRIVATE, descriptor, offset - before)
    finally:
        os.close(descriptor)
    if start == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    return np.asarray(_Region(start, size, address=start + before, source=content))


def _find_shared_files() -> list[_SharedFile]:
    """Lists this process's shared memory whose file it still has open."""
    with open("/proc/self/maps", "rb") as maps:
        found = [[int(number, 16) for number in line[:5]] + [int(line[5])] for line in _SHARED.findall(maps.read())]
    descriptors: dict[tuple[int, int], int] = {}
    for name in os.listdir("/proc/self/fd") if found else ():
        with suppress(OSError):  # closed meanwhile, as that of the listing itself
            descriptors[_key_of(int(name))] = int(name)
    return [
        _SharedFile(start, stop, offset, key, descriptors[key])
        for start, stop, offset, major, minor, inode in found
        if (key := (os.makedev(major, minor), inode)) in descriptors
    ]


def _key_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


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
