"""The stored pieces of a trace file as typed values: where each lies, its digests, and the sizes it may have.

What a damaged or forged header says of a piece raises ``ValueError`` here, before anything is allocated from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from mock_scheduler.support.crc import compute_crc32
from mock_scheduler.support.tensor_bytes import as_bytes, compute_tensor_digest, dtype_name
from mock_scheduler.trace.entries import DimName, RankPlace, TraceEntry, TraceKey
from mock_scheduler.trace.shards import Block, ShardSpec

T = TypeVar("T")

#: No tensor is larger: what a damaged or forged header may make a reader allocate.
MAX_TENSOR_BYTES = 1 << 40
#: Most pieces that one shard's blocks may cut a tensor into, where it stores fewer elements than that.
_MIN_REGIONS = 256
_MAX_DIMS = 32
#: Said of every file whose bytes are not those that were written.
DAMAGED = "the file was changed or damaged after it was written"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """Holds one step of one rank: the first statements of every trace file."""

    step: int
    place: RankPlace
    world_size: int

    def describe(self) -> str:
        """Returns ``step 0, global rank 3``."""
        return f"step {self.step}, global rank {self.place.global_rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceRecord:
    """Holds one stored piece of a tensor. sha256, crc32: over its dtype, shape and bytes."""

    key: TraceKey
    stored_name: str
    dtype: torch.dtype
    spec: ShardSpec
    dims: tuple[DimName, ...]
    is_masked: bool
    sha256: str
    crc32: int

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file: the local one, or flat where a rank owns a flat range."""
        if self.spec.flat_range is None:
            return self.spec.local_shape
        return (self.spec.flat_range[1] - self.spec.flat_range[0],)

    @property
    def size_bytes(self) -> int:
        """Number of stored bytes."""
        return math.prod(self.stored_shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Holds a stored piece, the rank that wrote it and the file holding it."""

    place: RankPlace
    path: Path
    record: PieceRecord

    @property
    def spec(self) -> ShardSpec:
        """Where the piece lies in the whole tensor."""
        return self.record.spec


class Shared:
    """Keeps equal values of the headers of one step once: most of what a rank says, others say too."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}

    def of(self, value: T) -> T:
        """Returns the first value that is equal and of the same type; ``value``: hashable, of numbers of one type."""
        first: T = self._values.setdefault((type(value), value), value)
        return first

    def record(self, record: PieceRecord) -> PieceRecord:
        """Returns a record whose key, name, places and dimensions are those of equal ones before."""
        return replace(
            record,
            key=self._values.setdefault((TraceKey, record.key, record.key.place), record.key),
            stored_name=self.of(record.stored_name),
            spec=self.of(record.spec),
            dims=self.of(record.dims),
        )


def compute_tensor_crc32(tensor: torch.Tensor) -> int:
    """Returns CRC-32 of a CPU tensor, over its type and shape as in ``int32[2, 3]`` and then its bytes."""
    prefix = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode()
    return compute_crc32(as_bytes(tensor).numpy().data, compute_crc32(prefix))


def has_crc32(piece: Piece, tensor: torch.Tensor) -> bool:
    """Whether stored elements have shape, dtype and CRC-32 of their piece: a tenth of the costs of SHA-256, or less."""
    record = piece.record
    is_alike = (tuple(tensor.shape), tensor.dtype) == (record.stored_shape, record.dtype)
    return is_alike and compute_tensor_crc32(tensor) == record.crc32


def has_sha256(piece: Piece, tensor: torch.Tensor) -> bool:
    """Whether stored elements have the SHA-256 of their piece."""
    return compute_tensor_digest(tensor) == piece.record.sha256


def describe_wrong_digest(piece: Piece, digest: Literal["CRC-32", "SHA-256"]) -> str:
    """Returns ``PATH: 000000/gradient/x does not match its digest (SHA-256)``."""
    return f"{piece.path}: {piece.record.stored_name} does not match its digest ({digest})"


def stored_name(update: int, kind: str, name: str, *, piece: int = 0) -> str:
    """A piece's name in the file; ``piece`` counts the pieces one rank holds of one tensor."""
    return f"{update:06d}/{kind}/{name}" + (f"#{piece}" if piece else "")


def record_entry(entry: TraceEntry, *, step: int, name: str) -> PieceRecord:
    """Records an entry, with digests; its tensor is exactly the one stored under ``name``."""
    return PieceRecord(
        key=TraceKey(step=step, update=entry.update, kind=entry.kind, name=entry.spec.name, place=entry.place),
        stored_name=name,
        dtype=entry.tensor.dtype,
        spec=entry.spec,
        dims=entry.dims,
        is_masked=entry.is_masked,
        sha256=compute_tensor_digest(entry.tensor),
        crc32=compute_tensor_crc32(entry.tensor),
    )


def check_spec(spec: ShardSpec) -> None:
    """Raises ``ValueError`` unless the blocks lie in both tensors, ascending in the local one, disjoint in the whole.

    The flat range must lie in the local tensor, and other dimensions must be equally long in both.
    """
    if len(spec.local_shape) != len(spec.global_shape) or len(spec.local_shape) > _MAX_DIMS:
        raise ValueError(f"{spec.name}: local shape {list(spec.local_shape)} of whole {list(spec.global_shape)}")
    dims = [split.dim for split in spec.splits]
    if dims != sorted(set(dims)) or (dims and dims[-1] >= len(spec.global_shape)):
        raise ValueError(f"{spec.name}: splits of dimensions {dims} of {len(spec.global_shape)}")
    for dim, (local, size) in enumerate(zip(spec.local_shape, spec.global_shape, strict=True)):
        if dim not in dims and local != size:
            raise ValueError(f"{spec.name}: dimension {dim} is not split, but has {local} of {size} indices")
    for split in spec.splits:
        sizes = spec.local_shape[split.dim], spec.global_shape[split.dim]
        _check_blocks(split.blocks, what=f"{spec.name}: dimension {split.dim}", sizes=sizes)
    numel = math.prod(spec.local_shape)
    if spec.flat_range is not None and not 0 <= spec.flat_range[0] <= spec.flat_range[1] <= numel:
        raise ValueError(f"{spec.name}: flat range {list(spec.flat_range)} of {numel} elements")


def _check_blocks(blocks: Sequence[Block], *, what: str, sizes: tuple[int, int]) -> None:
    spans = (
        [(block.local_start, block.local_start + block.length) for block in blocks],
        sorted((block.global_start, block.global_start + block.length) for block in blocks),
    )
    for side, ranges, size in zip(("local", "whole"), spans, sizes, strict=True):
        end = 0
        for start, stop in ranges:
            if not end <= start <= stop <= size:
                raise ValueError(f"{what}: blocks {ranges} of the {side} tensor overlap or leave its {size} indices")
            end = stop


def check_size(name: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
    """Raises ``ValueError`` for a shape that nobody may make a reader allocate."""
    for shape in shapes:
        if math.prod(size or 1 for size in shape) * dtype.itemsize > MAX_TENSOR_BYTES:
            raise ValueError(f"{name}: shape {list(shape)} has more than {MAX_TENSOR_BYTES} bytes")


def check_regions(spec: ShardSpec) -> None:
    """Raises ``ValueError`` where blocks cut the tensor into more regions than a reader may go through."""
    num_blocks = [len(split.blocks) for split in spec.splits]
    start, stop = spec.flat_range or (0, math.prod(spec.local_shape))
    # Every region of a whole piece has an element of its own. A flat range is part of a local tensor, cut only once.
    num_regions, most = math.prod(num_blocks), max(stop - start, sum(num_blocks), _MIN_REGIONS)
    if num_regions > most:
        raise ValueError(f"{spec.name}: blocks cut it into {num_regions} regions; it stores {stop - start} elements")
