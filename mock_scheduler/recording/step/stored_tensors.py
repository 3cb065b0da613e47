"""Describes a tensor in a step file: its safetensors name, dtype, shape and bytes, and the digests over blocks of them.

Contract: bit for bit, for every dtype with plain storage. bool is packed bits, little endian, under
``{name}#bits``; a dtype unknown to some safetensors readers is bytes with one more dimension, of the item's size,
under ``{name}#{dtype}``; every other tensor is stored as it is.

Block i of a tensor is its bytes from ``i * BLOCK_BYTES``; the last one may be shorter. A reader of some rows reads and
checks whole blocks and nothing else; ranges that touch in the file are read at once, since a remote file costs a round
trip per read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mock_scheduler.errors import CorruptRecordingError
from mock_scheduler.recording.storage import ByteSource
from mock_scheduler.support.raw_tensors import ITEM_SIZES, RawTensor

BLOCK_BYTES = 64 * 2**10
DIGEST_CHARS = 64

_SAFETENSORS_DTYPES: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
}


class TensorEntry(NamedTuple):  # every open makes some dozens, and a data class takes several times as long
    """A tensor of a step file. ``dtype``: torch's name of it; ``start`` and ``stop``: where its stored bytes lie in the
    file; ``blocks``: the SHA-256 (hex) of its blocks, one after another."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: str
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Returns stored bytes."""
        return self.stop - self.start

    @property
    def bits_per_entry(self) -> int:
        """Returns stored bits of one entry along the first dimension."""
        return math.prod(self.shape[1:]) * (1 if self.dtype == "bool" else 8 * ITEM_SIZES[self.dtype])

    def byte_range(self, entries: range) -> tuple[int, int]:
        """Returns the tensor's bytes holding these entries along the first dimension, as start and stop."""
        num_bits = self.bits_per_entry
        return entries.start * num_bits // 8, -(-entries.stop * num_bits // 8)


def count_stored_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """How many bytes a tensor takes in the file."""
    count = math.prod(shape)
    return -(-count // 8) if dtype == "bool" else count * ITEM_SIZES[dtype]


def stored_form(entry: TensorEntry) -> tuple[str, str, list[int]]:
    """The name, dtype and shape that any safetensors reader sees."""
    if entry.dtype == "bool":
        return f"{entry.name}#bits", "U8", [entry.size_bytes]
    if entry.dtype in _SAFETENSORS_DTYPES:
        return entry.name, _SAFETENSORS_DTYPES[entry.dtype], list(entry.shape)
    return f"{entry.name}#{entry.dtype}", "U8", [*entry.shape, ITEM_SIZES[entry.dtype]]


def stored_bytes(tensor: RawTensor) -> memoryview:
    """The bytes to store, as a view of the tensor where it is not bool."""
    if tensor.dtype == "bool":
        # Little endian, as the format says: bit i of a byte is element i.
        return np.packbits(tensor.content, bitorder="little").data
    return tensor.content.data


def view_raw(data: memoryview, entry: TensorEntry, *, entries: range | None = None) -> RawTensor:
    """The tensor, or ``entries`` of it along the first dimension, from its ``byte_range``: a view, except for bool."""
    shape = entry.shape if entries is None else (len(entries), *entry.shape[1:])
    content = np.frombuffer(data, dtype=np.uint8) if data else np.empty(0, dtype=np.uint8)
    if entry.dtype == "bool":
        # The first entry may begin inside a byte.
        skipped = 0 if entries is None else entries.start * entry.bits_per_entry % 8
        content = np.unpackbits(content, count=skipped + math.prod(shape), bitorder="little")[skipped:]
    return RawTensor(content, entry.dtype, shape)


def view_array(data: memoryview, entry: TensorEntry, *, entries: range | None = None) -> npt.NDArray[Any]:
    """``view_raw`` as an array, of a dtype that NumPy has."""
    if entry.dtype == "bool" or not data:
        array = view_raw(data, entry, entries=entries).array()
        assert array is not None
        return array
    array = np.frombuffer(data, dtype=entry.dtype)
    return array if len(entry.shape) == 1 else array.reshape(-1, *entry.shape[1:])


class TensorRange(NamedTuple):  # every load makes some dozens, and a data class takes several times as long
    """Holds bytes ``start`` to ``stop`` of a tensor, counted from its first one."""

    entry: TensorEntry
    start: int
    stop: int

    @classmethod
    def of(cls, entry: TensorEntry, entries: range | None) -> TensorRange:
        """Returns the range holding ``entries`` of the tensor along its first dimension; None: all of it."""
        start, stop = (0, entry.size_bytes) if entries is None else entry.byte_range(entries)
        return cls(entry, start, stop)

    def span(self, *, verify: bool) -> tuple[int, int]:
        """The bytes of the file to read for it: the blocks it touches or, where nothing is verified, just itself."""
        entry, start, stop = self
        # A digest is over a whole block, so the blocks at both ends are read whole.
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
        # Only ranges without a gap are joined: bytes nobody asked for are never read.
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
