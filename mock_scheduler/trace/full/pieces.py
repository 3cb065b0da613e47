"""What a trace file's header says of each stored piece of a tensor: as JSON, and back.

``pieces_as_json`` and ``parse_pieces`` are inverses. Many pieces lie at the same places, as those of all layers in one
micro-batch do; so the places are listed once, under ``blocks``, and a piece names them by their position there.
Parsing raises ``AttributeError``, ``IndexError``, ``KeyError``, ``TypeError`` or ``ValueError`` for anything but what
was written, which the reader turns into a ``TraceError`` with the path.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.support.digests import JSON, compute_tensor_digest
from mock_scheduler.support.tensor_bytes import DTYPES, as_bytes, dtype_name
from mock_scheduler.trace.entries import DIM_NAMES, DimName, RankPlace, TraceEntry, TraceKey
from mock_scheduler.trace.full.footers import as_count, as_counts
from mock_scheduler.trace.kinds import TRACE_KINDS
from mock_scheduler.trace.shards import Block, ShardSpec, Split

#: No tensor is larger: what a damaged or forged header may make a reader allocate.
MAX_TENSOR_BYTES = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceRecord:
    """One stored piece. sha256, crc32: of its dtype, shape and bytes, as ``compute_tensor_digest`` and
    ``compute_tensor_crc32`` give them."""

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
        """Of the stored bytes."""
        return math.prod(self.stored_shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A stored piece, the rank that wrote it and the file that it is in."""

    place: RankPlace
    path: Path
    record: PieceRecord

    @property
    def spec(self) -> ShardSpec:
        """Where the piece lies in the whole tensor."""
        return self.record.spec


def compute_tensor_crc32(tensor: torch.Tensor) -> int:
    """CRC-32 of a CPU tensor, over its type and shape as in ``int32[2, 3]`` and then its bytes."""
    prefix = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode()
    return zlib.crc32(as_bytes(tensor).numpy().data, zlib.crc32(prefix))


def stored_name(update: int, kind: str, name: str, *, piece: int = 0) -> str:
    """A piece's name in the file; ``piece`` counts those that one rank holds of one tensor."""
    return f"{update:06d}/{kind}/{name}" + (f"#{piece}" if piece else "")


def record_entry(entry: TraceEntry, *, step: int, name: str) -> PieceRecord:
    """The record, with digests, of an entry whose tensor is just what is stored under ``name``."""
    return PieceRecord(
        key=TraceKey(step=step, update=entry.update, kind=entry.kind, name=entry.spec.name),
        stored_name=name,
        dtype=entry.tensor.dtype,
        spec=entry.spec,
        dims=entry.dims,
        is_masked=entry.is_masked,
        sha256=compute_tensor_digest(entry.tensor),
        crc32=compute_tensor_crc32(entry.tensor),
    )


def check_spec(spec: ShardSpec) -> None:
    """Raise ``ValueError`` unless the blocks lie in both tensors, ascending in the local one and disjoint in the whole.

    The flat range must lie in the local tensor, and dimensions that are not split must be equally long in both.
    """
    if len(spec.local_shape) != len(spec.global_shape):
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


def pieces_as_json(records: Sequence[PieceRecord]) -> dict[str, JSON]:
    """``tensors``: by stored name; ``blocks``: the places that they name. The same for records in any order."""
    positions: dict[tuple[Block, ...], int] = {}
    tensors: dict[str, JSON] = {}
    for record in sorted(records, key=lambda item: item.stored_name):
        spec = record.spec
        tensors[record.stored_name] = {
            "update": record.key.update,
            "kind": record.key.kind,
            "name": record.key.name,
            "dtype": dtype_name(record.dtype),
            "global_shape": list(spec.global_shape),
            "local_shape": list(spec.local_shape),
            "splits": [[split.dim, positions.setdefault(split.blocks, len(positions))] for split in spec.splits],
            "flat_range": list(spec.flat_range) if spec.flat_range is not None else None,
            "dims": list(record.dims),
            "is_masked": record.is_masked,
            "sha256": record.sha256,
            "crc32": record.crc32,
        }
    blocks: list[JSON] = [
        [[block.local_start, block.global_start, block.length] for block in places] for places in positions
    ]
    return {"tensors": tensors, "blocks": blocks}


def parse_pieces(content: Mapping[str, Any], *, step: int) -> list[PieceRecord]:
    """The records that were written."""
    blocks = [tuple(_parse_block(*block) for block in places) for places in content["blocks"]]
    return [_parse_record(name, record, step=step, blocks=blocks) for name, record in content["tensors"].items()]


def _parse_block(local_start: object, global_start: object, length: object) -> Block:
    return Block(local_start=as_count(local_start), global_start=as_count(global_start), length=as_count(length))


def _parse_record(
    name: str, record: Mapping[str, Any], *, step: int, blocks: Sequence[tuple[Block, ...]]
) -> PieceRecord:
    kind, flat_range, dims = record["kind"], record["flat_range"], tuple(record["dims"])
    if kind not in TRACE_KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    if not isinstance(record["name"], str) or not isinstance(record["sha256"], str):
        raise ValueError(f"name {record['name']!r} and sha256 {record['sha256']!r} must be texts")
    if unknown := sorted(set(dims) - DIM_NAMES):
        raise ValueError(f"unknown dimensions {unknown}")
    key = TraceKey(step=step, update=as_count(record["update"]), kind=kind, name=record["name"])
    spec = ShardSpec(
        name=key.name,
        global_shape=as_counts(record["global_shape"]),
        local_shape=as_counts(record["local_shape"]),
        splits=tuple(Split(dim=as_count(dim), blocks=blocks[as_count(place)]) for dim, place in record["splits"]),
        flat_range=None if flat_range is None else (as_count(flat_range[0]), as_count(flat_range[1])),
    )
    check_spec(spec)
    dtype = DTYPES[record["dtype"]]
    if dims and len(dims) != len(spec.global_shape):
        raise ValueError(f"{spec.name}: {len(dims)} names of {len(spec.global_shape)} dimensions")
    if math.prod(spec.global_shape) * dtype.itemsize > MAX_TENSOR_BYTES:
        raise ValueError(f"{spec.name}: shape {list(spec.global_shape)} has more than {MAX_TENSOR_BYTES} bytes")
    return PieceRecord(
        key=key,
        stored_name=name,
        dtype=dtype,
        spec=spec,
        dims=dims,
        is_masked=bool(record["is_masked"]),
        sha256=record["sha256"],
        crc32=as_count(record["crc32"]),
    )
