"""Small traces, and damage to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.errors import TraceError
from mock_scheduler.support.digests import canonical_json, open_sealed, seal
from mock_scheduler.trace.entries import DimName, RankPlace, RowTable, StepFooter, TraceEntry, TraceKey
from mock_scheduler.trace.full.files import METADATA_KEY
from mock_scheduler.trace.full.pieces import compute_tensor_crc32
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.shards import Block, ShardSpec, Split, blocks_of_indices, cut_shard, whole
from tests.rank_traces import save_rank_trace

NORM = "decoder.layers.0.input_layernorm.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
LOGPROBS = "new_logprobs"
HIDDEN = "decoder.layers.0"

#: Three rows, of 3, 2 and 4 tokens: tokens 0 to 2, 3 and 4, 5 to 8.
ROWS = RowTable(identities=("train/0/a", "train/0/b", "train/1/c"), lengths=(3, 2, 4))


def key(name: str, *, kind: TraceKind = "gradient", step: int = 0, update: int = 0) -> TraceKey:
    """The key of a tensor."""
    return TraceKey(step=step, update=update, kind=kind, name=name)


def entry(
    spec: ShardSpec,
    tensor: torch.Tensor,
    *,
    kind: TraceKind = "gradient",
    update: int = 0,
    dims: tuple[DimName, ...] = (),
    is_masked: bool = False,
) -> TraceEntry:
    """A rank's piece."""
    return TraceEntry(update=update, kind=kind, spec=spec, tensor=tensor, dims=dims, is_masked=is_masked)


def place(rank: int) -> RankPlace:
    """A rank that stands apart from others on the axis of tensor parallelism."""
    return RankPlace(global_rank=rank, coordinates={"tp": rank, "pp": 0, "dp": 0})


def save(
    trace_dir: Path,
    rank: int,
    world_size: int,
    entries: Sequence[TraceEntry],
    *,
    step: int = 0,
    footer: StepFooter | None = None,
) -> Path:
    """A rank's step in one part."""
    return save_rank_trace(
        trace_dir,
        step=step,
        global_rank=rank,
        world_size=world_size,
        coordinates=place(rank).coordinates,
        entries=entries,
        footer=footer,
    )


def save_one(trace_dir: Path) -> Path:
    """A step of one rank with one tensor."""
    return save(trace_dir, 0, 1, [entry(whole(NORM, (4,)), torch.ones(4))])


def gated_spec(tp_rank: int, *, flat_range: tuple[int, int] | None = None) -> ShardSpec:
    """Rank ``tp_rank`` of 2: half of the gate rows 0-3 and half of the up rows 4-7."""
    blocks = tuple(Block(local_start=2 * half, global_start=4 * half + 2 * tp_rank, length=2) for half in range(2))
    return ShardSpec(
        name=FC1, global_shape=(8, 3), local_shape=(4, 3), splits=(Split(dim=0, blocks=blocks),), flat_range=flat_range
    )


def token_piece(
    tensor: torch.Tensor,
    tokens: Sequence[int],
    *,
    name: str = LOGPROBS,
    kind: TraceKind = "output",
    channels: Sequence[int] | None = None,
    is_masked: bool = False,
    update: int = 0,
) -> TraceEntry:
    """The piece of a whole token tensor ``[T]`` or ``[T, C]`` that has these tokens, and these channels (all)."""
    splits = [Split(dim=0, blocks=blocks_of_indices(tokens))]
    shape = [len(tokens), *tensor.shape[1:]]
    if channels is not None:
        splits.append(Split(dim=1, blocks=blocks_of_indices(channels)))
        shape[1] = len(channels)
    spec = ShardSpec(name=name, global_shape=tuple(tensor.shape), local_shape=tuple(shape), splits=tuple(splits))
    dims: tuple[DimName, ...] = ("token", "channel")
    return entry(
        spec, cut_shard(tensor, spec), kind=kind, update=update, dims=dims[: tensor.dim()], is_masked=is_masked
    )


def refused(trace_dir: Path) -> str:
    """Why a trace cannot be opened."""
    with pytest.raises(TraceError) as caught:
        open_trace(trace_dir)
    return str(caught.value)


def refused_merge(trace_dir: Path, wanted: TraceKey) -> str:
    """Why a tensor of a trace cannot be merged."""
    with open_trace(trace_dir) as reader, pytest.raises(TraceError) as caught:
        reader.merge(wanted)
    return str(caught.value)


def rewrite_metadata(path: Path, change: Callable[[str], str]) -> None:
    """Replace the text of the metadata in a trace file, and nothing else."""
    with safe_open(path, framework="pt") as handle:
        text = handle.metadata()[METADATA_KEY]
    save_file(load_file(path), path, metadata={METADATA_KEY: change(text)})


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the metadata's content and give it a digest that fits."""

    def rewrite(text: str) -> str:
        content = open_sealed(text)
        change(content)
        return canonical_json(seal(content))

    rewrite_metadata(path, rewrite)


def flip_last_byte(path: Path) -> None:
    """Damage the last tensor that is stored in a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def forge_tensor(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change a stored tensor, and make its CRC-32 and the header's digest fit, but not its SHA-256."""
    tensors = load_file(path)
    tensors[name] = change(tensors[name]).contiguous()
    with safe_open(path, framework="pt") as handle:
        content = open_sealed(handle.metadata()[METADATA_KEY])
    content["tensors"][name]["crc32"] = compute_tensor_crc32(tensors[name])
    save_file(tensors, path, metadata={METADATA_KEY: canonical_json(seal(content))})


def forge_sha256(path: Path, name: str) -> None:
    """State another SHA-256 of a stored tensor, in a header whose own digest fits."""
    reseal(path, lambda content: content["tensors"][name].update(sha256="0" * 64))
