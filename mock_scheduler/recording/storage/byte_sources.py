"""The bytes of one recorded file, readable by range: read from a disk, held in memory, or fetched.

Contract: a reader gets memory of its own, writable, so torch may wrap it: nothing written there reaches
the file, and nothing that happens to the file later reaches verified bytes. A file is not mapped for that
reason: a map shows the writes of other processes, and ends this process where the file is truncated. A range that
the file does not have is an error, never a shorter answer.
"""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from typing import Protocol

import numpy as np

from mock_scheduler.errors import CorruptRecordingError, RecordingError

_ALIGNMENT = 16  # of what NumPy allocates


class ByteSource(Protocol):
    """The bytes of one file, readable by range."""

    @property
    def size_bytes(self) -> int:
        """Size of the file, decompressed."""

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` as a *writable* view that is private to the reader (torch may wrap it).

        Raises ``RecordingError`` on input/output errors and its ``CorruptRecordingError`` where the file has no such
        bytes.
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


class FileSource:
    """A file on a disk, open from ``open_file`` until nothing refers to this any more; each range is read once."""

    def __init__(self, descriptor: int, *, path: str) -> None:
        self._descriptor = descriptor
        self._path = path
        self._size_bytes = os.fstat(descriptor).st_size
        weakref.finalize(self, os.close, descriptor)

    @property
    def size_bytes(self) -> int:
        """Size when it was opened."""
        return self._size_bytes

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop``, read now into memory that only the caller has."""
        check_range(start, stop, self._size_bytes, path=self._path)
        # As far from an aligned address as in the file, whose tensors are aligned.
        skipped = start % _ALIGNMENT
        view = np.empty(skipped + stop - start, dtype=np.uint8)[skipped:].data
        filled = 0
        while filled < stop - start:
            try:
                count = os.preadv(self._descriptor, [view[filled:]], start + filled)
            except OSError as error:
                raise RecordingError(f"cannot read {self._path}: {error.strerror or error}. Check its disk.") from error
            if count == 0:
                raise CorruptRecordingError(
                    f"{self._path}: it ended at byte {start + filled} while it was read, of {self._size_bytes} when it "
                    "was opened: another process truncated it. Restore it from a copy or record again."
                )
            filled += count
        return view


def open_file(path: str, *, shown_path: str) -> FileSource:
    """The file, to be read by range. Raises ``OSError``, or ``CorruptRecordingError`` as ``open_regular``."""
    return FileSource(open_regular(path, shown_path=shown_path), path=shown_path)


def open_regular(path: str, *, shown_path: str) -> int:
    """Opens a file to read and gives its descriptor, for the caller to close; files that block for ever are refused.

    Raises ``OSError``, or ``CorruptRecordingError`` where it is a folder, a pipe, a socket or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise CorruptRecordingError(
            f"{shown_path} is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, where a regular file is expected: remove it"
        )
    return descriptor


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_range(start: int, stop: int, size_bytes: int, *, path: str) -> None:
    """Raise ``CorruptRecordingError`` where a file of ``size_bytes`` has no bytes ``start`` to ``stop``."""
    if not 0 <= start <= stop <= size_bytes:
        raise CorruptRecordingError(
            f"{path}: bytes {start} to {stop} are outside the file, which has {size_bytes}: truncated or changed. "
            "Restore it from a copy or record again."
        )


def check_name(name: str, *, location: str) -> None:
    """Raise ``RecordingError`` where ``name`` is no plain relative name; ``""`` is the location itself."""
    is_plain = not name or all(part not in ("", ".", "..") for part in name.split("/"))
    if not is_plain or "\\" in name or "\0" in name:
        raise RecordingError(f"{name!r} cannot name a file of the recording {location}: it is not followed")
