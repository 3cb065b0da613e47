"""Compressed files of a recording: one zstd frame each, with its content's size and checksum.

Contract: equal content gives equal bytes with the same release of zstandard. What a frame may unfold to is bounded
before any memory is taken, and nothing but the whole, unchanged content is ever returned.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from types import ModuleType

from mock_scheduler.errors import CorruptRecordingError, RecordingError
from mock_scheduler.files import Buffer

COMPRESSED_ENDING = ".zst"
MAX_DECOMPRESSED_BYTES = 16 * 2**30

_LEVEL = 9  # token ids shrink little further above it, and the time doubles with every few levels


def compress(pieces: Sequence[Buffer]) -> bytes:
    """One frame of these pieces in order; raises ``RecordingError`` where zstandard is not installed."""
    compressor = _load_zstandard().ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
    # In one call: a frame made piece by piece depends on where the pieces end.
    return bytes(compressor.compress(b"".join(pieces)))


def decompress(data: Buffer, *, path: str, max_bytes: int = MAX_DECOMPRESSED_BYTES) -> memoryview:
    """The content of the one frame that ``data`` is, writable.

    Raises ``CorruptRecordingError`` naming ``path`` where it is damaged, says no size or one above ``max_bytes``, or
    unfolds to another size than it says; ``RecordingError`` where zstandard is not installed.
    """
    zstandard = _load_zstandard()
    try:
        size_bytes = zstandard.get_frame_parameters(data).content_size
        if size_bytes in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
            raise _corrupt(path, "the zstd frame does not say how large its content is")
        if size_bytes > max_bytes:
            raise _corrupt(path, f"the zstd frame says its content has {size_bytes} bytes; the limit is {max_bytes}")
        # An anonymous map takes memory only as far as it is filled, whatever a forged frame says.
        content = memoryview(mmap.mmap(-1, size_bytes + 1))
        filled = 0
        with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
            while filled <= size_bytes and (count := reader.readinto(content[filled:])):
                filled += count
    except zstandard.ZstdError as error:
        raise _corrupt(path, f"the zstd frame is damaged ({error})") from error
    if filled != size_bytes:
        found = f"{filled} bytes" if filled < size_bytes else "more"
        raise _corrupt(path, f"the zstd frame says its content has {size_bytes} bytes, but it has {found}")
    return content[:size_bytes]


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
