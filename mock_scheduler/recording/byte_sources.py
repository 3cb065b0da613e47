"""The bytes of one recorded file, readable by range: mapped from a disk, held in memory, or fetched.

Contract: what a reader gets is private to it and writable, so that torch may wrap it; nothing written there reaches the
file. A range that the file does not have is an error, never a shorter answer.
"""

from __future__ import annotations

import mmap
import os
from typing import Protocol

from mock_scheduler.errors import CorruptRecordingError


class ByteSource(Protocol):
    """The bytes of one file, readable by range."""

    @property
    def size_bytes(self) -> int:
        """Size of the file, decompressed."""

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` as a *writable* view that is private to the reader (torch may wrap it).

        Locally a slice of a private memory map: no bytes are copied. Raises ``RecordingError`` on input/output errors
        and its ``CorruptRecordingError`` where the file has no such bytes.
        """


class MemorySource:
    """Bytes that are in memory already; ``data`` must be writable, and belongs to the reader from now on."""

    def __init__(self, data: bytearray | mmap.mmap | memoryview, *, path: str) -> None:
        self._view = memoryview(data)
        self._path = path

    @property
    def size_bytes(self) -> int:
        """Number of bytes."""
        return self._view.nbytes

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop``, not copied; raises ``CorruptRecordingError`` outside the file."""
        check_range(start, stop, self.size_bytes, path=self._path)
        return self._view[start:stop]


def map_file(path: str, *, shown_path: str) -> MemorySource:
    """The file as a private map: what a reader writes into a tensor never reaches the disk. Raises ``OSError``."""
    with open(path, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size == 0:  # mmap refuses it
            return MemorySource(bytearray(), path=shown_path)
        return MemorySource(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), path=shown_path)


def check_range(start: int, stop: int, size_bytes: int, *, path: str) -> None:
    """Raise ``CorruptRecordingError`` where a file of ``size_bytes`` has no bytes ``start`` to ``stop``."""
    if not 0 <= start <= stop <= size_bytes:
        raise CorruptRecordingError(
            f"{path}: bytes {start} to {stop} are outside the file, which has {size_bytes}: truncated or changed. "
            "Restore it from a copy or record again."
        )
