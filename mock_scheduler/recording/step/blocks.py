"""Digests over the blocks of a tensor's bytes, and reads by range with a check of just the touched blocks.

Contract: block i of a tensor is its bytes from ``i * BLOCK_BYTES``; the last one may be shorter. A reader of some rows
reads and checks whole blocks and nothing else; ranges that touch in the file are read at once, since a remote file
costs a round trip per read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mock_scheduler.errors import CorruptRecordingError
from mock_scheduler.recording.step.stored import TensorEntry
from mock_scheduler.recording.storage import ByteSource

BLOCK_BYTES = 64 * 2**10
DIGEST_CHARS = 64


class TensorRange(NamedTuple):  # every load makes some dozens, and a data class takes several times as long
    """Bytes ``start`` to ``stop`` of a tensor, counted from its first one."""

    entry: TensorEntry
    start: int
    stop: int

    @classmethod
    def of(cls, entry: TensorEntry, entries: range | None) -> TensorRange:
        """The range holding ``entries`` of the tensor along its first dimension; None: all of it."""
        start, stop = (0, entry.size_bytes) if entries is None else entry.byte_range(entries)
        return cls(entry, start, stop)

    def span(self, *, verify: bool) -> tuple[int, int]:
        """The bytes of the file to read for it: the blocks it touches or, where nothing is verified, just itself."""
        entry, start, stop = self
        if verify and start < stop:
            start -= start % BLOCK_BYTES
            stop = min(entry.stop - entry.start, count_blocks(stop) * BLOCK_BYTES)
        return entry.start + start, entry.start + stop


def count_blocks(size_bytes: int) -> int:
    """How many blocks that many bytes have."""
    return -(-size_bytes // BLOCK_BYTES)


def digest_blocks(data: memoryview) -> str:
    """The SHA-256 (hex) of each block of a tensor's bytes, one after another; empty where there are no bytes."""
    if 0 < len(data) <= BLOCK_BYTES:  # as most tensors
        return hashlib.sha256(data).hexdigest()
    starts = range(0, len(data), BLOCK_BYTES)
    return "".join([hashlib.sha256(data[start : start + BLOCK_BYTES]).hexdigest() for start in starts])


class BlockReader:
    """Reads ranges of a step file's tensors; ``name`` is the file's, for messages."""

    def __init__(self, source: ByteSource, *, name: str) -> None:
        self._source = source
        self._name = name
        self.num_bytes_read = 0

    def read(self, ranges: Sequence[TensorRange], *, verify: bool) -> dict[str, memoryview]:
        """Views of the ranges' bytes, by tensor name.

        Raises ``CorruptRecordingError`` naming every tensor with a read block that does not match its digest
        (nothing is looked at without ``verify``).
        """
        loaded: dict[str, memoryview] = {}
        changed: list[str] = []
        for start, stop, members in _merge_touching(ranges, verify=verify):
            data = self._source.read(start, stop)
            self.num_bytes_read += stop - start
            for (entry, wanted_start, wanted_stop), first, last in members:
                if verify and not _is_intact(data[first - start : last - start], entry, first - entry.start):
                    changed.append(entry.name)
                offset = entry.start - start
                loaded[entry.name] = data[offset + wanted_start : offset + wanted_stop]
        if changed:
            names = ", ".join(repr(tensor) for tensor in sorted(changed))
            raise CorruptRecordingError(
                f"{self._name}: tensor {names} does not match its digest: the file was changed after it was written. "
                "Restore it from a copy or record the step again."
            )
        return loaded


def _merge_touching(
    ranges: Sequence[TensorRange], *, verify: bool
) -> Iterator[tuple[int, int, list[tuple[TensorRange, int, int]]]]:
    """Reads ``(start, stop, members)`` that cover the ranges, each member with its own part of the read."""
    members: list[tuple[TensorRange, int, int]] = []
    for wanted in sorted(ranges, key=lambda wanted: wanted.entry.start):
        first, last = wanted.span(verify=verify)
        if members and first != members[-1][2]:
            yield members[0][1], members[-1][2], members
            members = []
        members.append((wanted, first, last))
    if members:
        yield members[0][1], members[-1][2], members


def _is_intact(part: memoryview, entry: TensorEntry, offset: int) -> bool:
    """Whether whole blocks, from byte ``offset`` of the tensor on, match their digests."""
    if len(part) == entry.stop - entry.start:
        return digest_blocks(part) == entry.blocks
    first = offset // BLOCK_BYTES * DIGEST_CHARS
    return digest_blocks(part) == entry.blocks[first : first + count_blocks(len(part)) * DIGEST_CHARS]
