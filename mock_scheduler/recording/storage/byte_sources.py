"""Reads ranges of one recorded file's bytes: from a disk, held in memory, fetched, or decompressed.

Contract: a reader gets memory of its own, writable, so torch may wrap it: nothing written there reaches
the file, and nothing that happens to the file later reaches verified bytes. A file is not mapped for that
reason: a map shows the writes of other processes, and ends this process where the file is truncated. A range that
the file does not have is an error, never a shorter answer.

A compressed file is one zstd frame with its content's size and checksum. Equal content gives equal bytes with the same
release of zstandard. Opening unpacks nothing, and finds a file truncated or longer than its frame. Reading unpacks as
far as it is asked, so a file whose first bytes are refused takes no memory for the rest; with the last byte, the
checksum of the whole content is compared.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from io import RawIOBase
from types import ModuleType
from typing import Protocol

import numpy as np

from mock_scheduler.errors import CorruptRecordingError, ForeignFileError, RecordingError
from mock_scheduler.support import foreign_files
from mock_scheduler.support.files import Buffer

_ALIGNMENT = 16  # of what NumPy allocates
COMPRESSED_ENDING = ".zst"
MAX_DECOMPRESSED_BYTES = 16 * 2**30
#: Content may be so many times as large as its frame, or ``_MIN_LIMIT_BYTES`` where this is more. Recorded steps shrink
#: 2 to 10 times; a frame of zeros alone 33,000 times.
MAX_RATIO = 1000
_MIN_LIMIT_BYTES = 64 * 2**20
#: The longest header of a frame; and what is read of a frame at once.
_FRAME_HEADER_BYTES, _STREAM_BYTES = 18, 2**20
# The frame format, RFC 8878, section 3.1.1: its descriptor, of which two bits mean nothing, and its blocks.
_DESCRIPTOR_AT, _UNUSED_BITS = 4, 0b0001_1000
_REPEATED, _COMPRESSED, _RESERVED = 1, 2, 3
_BLOCK_HEADER_BYTES, _CHECKSUM_BYTES, _MAX_BLOCK_BYTES = 3, 4, 128 * 2**10
_LEVEL = 9  # token ids shrink little further above it, and the time doubles with every few levels


class ByteSource(Protocol):
    """The bytes of one file, readable by range."""

    @property
    def size_bytes(self) -> int:
        """Returns the size of the file, decompressed."""

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
    try:
        return foreign_files.open_regular(path, shown_path=shown_path)
    except ForeignFileError as error:
        raise CorruptRecordingError(str(error)) from error


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


def compress(pieces: Sequence[Buffer]) -> bytes:
    """Returns one frame of the given pieces in order.

    Raises ``RecordingError`` where zstandard is not installed, and where the frame would be refused when it is read.
    """
    compressor = _load_zstandard().ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
    # In one call: a frame made piece by piece depends on where the pieces end.
    content = b"".join(pieces)
    frame = bytes(compressor.compress(content))
    if len(content) > most_content_bytes(len(frame)):
        raise RecordingError(
            f"a step of {len(content)} bytes shrinks to {len(frame)}, more than {MAX_RATIO} times, which no reader "
            "takes: it is nearly all one value. Record it with rollout_mock.compression: none"
        )
    return frame


def most_content_bytes(frame_bytes: int) -> int:
    """How much content a frame of this size may have."""
    return max(_MIN_LIMIT_BYTES, MAX_RATIO * frame_bytes)


class CompressedSource:
    """The content of one frame, as a ``ByteSource``; made by ``open_compressed``."""

    def __init__(self, reader: RawIOBase, *, size_bytes: int, path: str, error: type[Exception]) -> None:
        self._reader = reader
        self._size_bytes = size_bytes
        self._path = path
        self._error = error
        # An anonymous map takes memory only as far as it is filled. One more byte shows where the frame goes on.
        self._content = memoryview(mmap.mmap(-1, size_bytes + 1))
        self._num_unpacked = 0

    @property
    def size_bytes(self) -> int:
        """Returns the size of the content."""
        return self._size_bytes

    def read(self, start: int, stop: int) -> memoryview:
        """Returns bytes ``start`` to ``stop``, writable and not copied.

        Raises ``CorruptRecordingError`` outside the content, where the frame is damaged, and, with the last byte, where
        the content does not match its checksum or its size.
        """
        check_range(start, stop, self._size_bytes, path=self._path)
        try:
            self._unpack(stop)
            if stop == self._size_bytes:
                self._unpack(stop + 1)  # the end of the frame, where its checksum is compared
        except self._error as error:
            raise _corrupt(self._path, f"the zstd frame is damaged ({error})") from error
        if not stop <= self._num_unpacked <= self._size_bytes:
            found = f"{self._num_unpacked} bytes" if self._num_unpacked < stop else "more"
            raise _corrupt(
                self._path, f"the zstd frame says its content has {self._size_bytes} bytes, but it has {found}"
            )
        return self._content[start:stop]

    def _unpack(self, stop: int) -> None:
        while self._num_unpacked < stop:
            count = self._reader.readinto(self._content[self._num_unpacked : stop])
            if not count:
                return
            self._num_unpacked += count


def open_compressed(source: ByteSource, *, path: str) -> CompressedSource:
    """The content of the one frame that a file is; reads the headers of its blocks, and unpacks nothing yet.

    Raises ``CorruptRecordingError`` naming ``path`` where it is no whole frame and nothing else, has no checksum
    or size, or says a size above a limit or above its blocks' capacity; ``RecordingError`` where zstandard is
    not installed.
    """
    zstandard = _load_zstandard()
    first = source.read(0, min(source.size_bytes, _FRAME_HEADER_BYTES))
    try:
        header = zstandard.get_frame_parameters(first)
        header_bytes = zstandard.frame_header_size(first)
    except zstandard.ZstdError as error:
        raise _corrupt(path, f"the zstd frame is damaged ({error})") from error
    size_bytes = header.content_size
    if first[_DESCRIPTOR_AT] & _UNUSED_BITS or not header.has_checksum or header.dict_id:
        raise _corrupt(path, "the zstd frame is damaged (its header is not one that this program writes)")
    if size_bytes in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
        raise _corrupt(path, "the zstd frame does not say how large its content is")
    if size_bytes > MAX_DECOMPRESSED_BYTES:
        raise _corrupt(
            path, f"the zstd frame says its content has {size_bytes} bytes; the limit is {MAX_DECOMPRESSED_BYTES}"
        )
    most_bytes = _measure_blocks(source, header_bytes, path=path)
    if size_bytes > most_bytes:
        raise _corrupt(
            path, f"the zstd frame says its content has {size_bytes} bytes; its blocks hold at most {most_bytes}"
        )
    # Last, since a frame of the right form may still be all but empty: 67 KB of zeros unpack to 2 GB.
    limit = most_content_bytes(source.size_bytes)
    if size_bytes > limit:
        raise _corrupt(path, f"{source.size_bytes} bytes unpack to {size_bytes}; the limit is {limit}")
    reader = zstandard.ZstdDecompressor().stream_reader(_Stream(source), read_size=_STREAM_BYTES)
    return CompressedSource(reader, size_bytes=size_bytes, path=path, error=zstandard.ZstdError)


class _Stream:
    """A file from its first byte on, as a decompressor reads it: no more of it is in memory than one read."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._position = 0

    def read(self, size: int) -> memoryview:
        """Returns the next bytes, at most ``size`` of them; none at the end."""
        start = self._position
        self._position = min(start + size, self._source.size_bytes)
        return self._source.read(start, self._position)


def _measure_blocks(source: ByteSource, position: int, *, path: str) -> int:
    """How many bytes the blocks from ``position`` on unpack to at most; raises where the frame does not end the file.

    The decoder takes a frame that lacks its checksum for whole, and passes over bytes after one. (RFC 8878, 3.1.1.2:
    a block has a header of 3 bytes, little endian: 1 bit for the last one, 2 for its kind, 21 for its size.)
    """
    most_bytes, is_last, size_bytes = 0, False, source.size_bytes
    while not is_last and position + _BLOCK_HEADER_BYTES <= size_bytes:
        header = int.from_bytes(source.read(position, position + _BLOCK_HEADER_BYTES), "little")
        is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        # No encoder writes an empty block before the last one, and a hole in a file is nothing but these.
        if kind == _RESERVED or size > _MAX_BLOCK_BYTES or (size == 0 and not is_last):
            raise _corrupt(path, f"the zstd frame is damaged (block at byte {position})")
        most_bytes += _MAX_BLOCK_BYTES if kind == _COMPRESSED else size
        position += _BLOCK_HEADER_BYTES + (1 if kind == _REPEATED else size)
    position += _CHECKSUM_BYTES
    if not is_last or position > size_bytes:
        raise _corrupt(path, "the zstd frame is not whole")
    if position < size_bytes:
        raise _corrupt(path, f"{size_bytes - position} bytes follow the zstd frame")
    return most_bytes


def _corrupt(path: str, problem: str) -> CorruptRecordingError:
    return CorruptRecordingError(
        f"{path}: {problem}: the file was truncated or changed after it was written. Restore it from a copy or record "
        "again."
    )


def _load_zstandard() -> ModuleType:
    # An optional package, needed only where compression is used.
    try:
        import zstandard
    except ImportError as error:
        raise RecordingError(
            "compressed recordings (rollout_mock.compression: zstd, files ending in .zst) need the package zstandard, "
            "which is not installed: pip install 'mock-scheduler[zstd]'"
        ) from error
    return zstandard
