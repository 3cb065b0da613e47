"""Simulated ranks: traces as runs of many ranks, or of large models, write them, by the library's own writers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.entries import DimName, RankPlace, RowTable, StepFooter, TraceEntry, TraceSink
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import ShardSpec, Split, blocks_of_indices, even_split
from mock_scheduler.trace.sketch.files import SketchSink

TP, PP = 8, 8
MODEL_RANKS = TP * PP

_LAYERS_PER_STAGE = 2
_HIDDEN, _FFN, _VOCAB = 64, 128, 1024
_NUM_ROWS, _ROW_TOKENS = 256, 2
_STATE_KINDS: tuple[TraceKind, ...] = ("gradient", "parameter")


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A weight of a layer; ``dim``: the one that tensor parallelism splits, ``None`` where each rank holds all of it.

    num_parts: as of ``even_split``.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    num_parts: int = 1

    def spec(self, rank: int, num_ranks: int, prefix: str) -> ShardSpec:
        """Gives one rank's shard of the weight named ``prefix`` and its name."""
        splits: tuple[Split, ...] = ()
        local = list(self.shape)
        if self.dim is not None:
            size = self.shape[self.dim]
            splits = even_split(self.dim, size=size, rank=rank, num_ranks=num_ranks, num_parts=self.num_parts)
            local[self.dim] = size // num_ranks
        return ShardSpec(name=prefix + self.name, global_shape=self.shape, local_shape=tuple(local), splits=splits)


def layer_weights(hidden: int, ffn: int) -> tuple[Weight, ...]:
    """Gives the weights of a gated transformer layer."""
    return (
        Weight(name="input_layernorm.weight", shape=(hidden,)),
        Weight(name="self_attention.linear_qkv.weight", shape=(3 * hidden, hidden), dim=0),
        Weight(name="self_attention.linear_proj.weight", shape=(hidden, hidden), dim=1),
        Weight(name="mlp.linear_fc1.weight", shape=(2 * ffn, hidden), dim=0, num_parts=2),
        Weight(name="mlp.linear_fc2.weight", shape=(hidden, ffn), dim=1),
    )


def write_many_ranks(path: Path, *, num_ranks: int, is_sketch: bool = False) -> None:
    """Writes one step of ``num_ranks`` ranks of tp8 × pp8 × dp: activations, and optimizer shards over dp.

    The model and the batch are small, and the same for every number of ranks. Raises ``ValueError`` where 64 does not
    divide the ranks, or they are more than 16,384.
    """
    if num_ranks % MODEL_RANKS or _NUM_ROWS % (num_ranks // MODEL_RANKS):
        raise ValueError(f"{num_ranks} ranks are not tp{TP} × pp{PP} × dp, with {_NUM_ROWS} rows for dp to share")
    identities = tuple(f"train/{row:04d}/0" for row in range(_NUM_ROWS))
    rows = RowTable(identities=identities, lengths=(_ROW_TOKENS,) * _NUM_ROWS)
    footer = StepFooter(rows=rows, update_rows=(tuple(range(_NUM_ROWS)),))
    for rank in range(num_ranks):
        place = place_of(rank)
        sink: TraceSink
        if is_sketch:
            sink = SketchSink(path, step=0, place=place, world_size=num_ranks)
        else:
            sink = FullSink(path, step=0, place=place, world_size=num_ranks)
        for entry in _entries_of(place, dp_size=num_ranks // MODEL_RANKS):
            sink.add(entry)
        sink.close(footer)


def place_of(rank: int) -> RankPlace:
    """Gives a rank's place: tp first, then dp, then pp are next to each other, as in Megatron."""
    model_rank = rank % MODEL_RANKS
    return RankPlace(
        global_rank=rank,
        coordinates={"tp": model_rank % TP, "pp": model_rank // TP, "dp": rank // MODEL_RANKS},
    )


def _entries_of(place: RankPlace, *, dp_size: int) -> Iterator[TraceEntry]:
    tp_rank, pp_rank, dp_rank = (place.coordinates[axis] for axis in ("tp", "pp", "dp"))
    for number in range(_LAYERS_PER_STAGE * pp_rank, _LAYERS_PER_STAGE * (pp_rank + 1)):
        prefix = f"decoder.layers.{number}."
        yield _activation(prefix.rstrip("."), dp_rank, dp_size)
        for weight in layer_weights(_HIDDEN, _FFN):
            yield from _state(weight, prefix, tp_rank, (dp_rank, dp_size))
    outer = {0: "embedding.word_embeddings.weight", PP - 1: "output_layer.weight"}
    if pp_rank in outer:
        weight = Weight(name=outer[pp_rank], shape=(_VOCAB, _HIDDEN), dim=0)
        yield from _state(weight, "", tp_rank, (dp_rank, dp_size))


def _state(weight: Weight, prefix: str, tp_rank: int, dp: tuple[int, int]) -> Iterator[TraceEntry]:
    """Yields what the distributed optimizer holds of one weight: a flat range of the shard."""
    spec = weight.spec(tp_rank, TP, prefix)
    numel = math.prod(spec.local_shape)
    start, stop = (numel * (dp[0] + end) // dp[1] for end in (0, 1))
    spec = replace(spec, flat_range=(start, stop))
    dims: tuple[DimName, ...] = ("row", "column")
    for position, kind in enumerate(_STATE_KINDS):
        # Ranks of tp hold copies of what it does not split.
        values = torch.arange(start, stop, dtype=torch.float32) * (0.5 + position) + (tp_rank if spec.splits else 0)
        yield TraceEntry(update=0, kind=kind, spec=spec, tensor=values, dims=dims[: len(spec.global_shape)])


def _activation(name: str, dp_rank: int, dp_size: int) -> TraceEntry:
    """Makes the output of a layer at the tokens of one dp rank, every tp rank with a copy of it."""
    tokens = _NUM_ROWS * _ROW_TOKENS // dp_size
    first = tokens * dp_rank
    spec = ShardSpec(
        name=name,
        global_shape=(_NUM_ROWS * _ROW_TOKENS, _HIDDEN),
        local_shape=(tokens, _HIDDEN),
        splits=(Split(dim=0, blocks=blocks_of_indices(range(first, first + tokens))),),
    )
    values = torch.arange(tokens * _HIDDEN, dtype=torch.float32).view(tokens, _HIDDEN).cos() + dp_rank
    return TraceEntry(update=0, kind="activation", spec=spec, tensor=values, dims=("token", "channel"))


# --- Large models -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The sizes of a decoder with grouped-query attention and gated layers."""

    hidden: int = 4096
    ffn: int = 14336
    kv_width: int = 1024
    vocab: int = 128256
    num_layers: int = 32

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Yields every weight with its prefix, in the order of the forward pass."""
        yield "", Weight(name="embedding.word_embeddings.weight", shape=(self.vocab, self.hidden), dim=0)
        for number in range(self.num_layers):
            prefix = f"decoder.layers.{number}."
            qkv = Weight(
                name="self_attention.linear_qkv.weight", shape=(self.hidden + 2 * self.kv_width, self.hidden), dim=0
            )
            for weight in layer_weights(self.hidden, self.ffn):
                yield prefix, qkv if weight.name == qkv.name else weight
        yield "", Weight(name="decoder.final_layernorm.weight", shape=(self.hidden,))
        yield "", Weight(name="output_layer.weight", shape=(self.vocab, self.hidden), dim=0)

    @property
    def num_parameters(self) -> int:
        """Counts the elements of all weights."""
        return sum(math.prod(weight.shape) for _, weight in self.weights())


def small_model(num_layers: int) -> Model:
    """Gives a model of 8 MB tensors at most, for what grows with the number of layers."""
    return Model(hidden=1024, ffn=2048, kv_width=256, vocab=4096, num_layers=num_layers)


def write_large_model(path: Path, model: Model) -> None:
    """Writes the gradients of a model in bfloat16, as 64 ranks of tp8 × pp8 hold them, one rank at a time."""
    for rank in range(MODEL_RANKS):
        place = place_of(rank)
        sink = FullSink(path, step=0, place=place, world_size=MODEL_RANKS)
        for prefix, weight in model.weights():
            if _stage_of(prefix, weight.name, model.num_layers) != place.coordinates["pp"]:
                continue
            spec = weight.spec(place.coordinates["tp"], TP, prefix)
            sink.add(_gradient(spec, seed=0 if weight.dim is None else rank))
        sink.close(StepFooter())


def write_cut_tensor(path: Path, name: str, shape: tuple[int, ...], *, padded_rows: int = 0) -> None:
    """Writes one tensor in bfloat16 that 64 ranks hold equal shares of, cut along its first dimension.

    padded_rows: rows of padding behind the whole tensor, which ranks hold too, as of a vocabulary.
    """
    share = (shape[0] + padded_rows) // MODEL_RANKS
    for rank in range(MODEL_RANKS):
        first = rank * share
        indices = range(first, min(first + share, shape[0]))
        splits = (Split(dim=0, blocks=blocks_of_indices(indices)),)
        spec = ShardSpec(name=name, global_shape=shape, local_shape=(share, *shape[1:]), splits=splits)
        sink = FullSink(path, step=0, place=place_of(rank), world_size=MODEL_RANKS)
        sink.add(_gradient(spec, seed=rank))
        sink.close(StepFooter())


def write_ranges(path: Path, *, num_parameters: int, numel: int) -> None:
    """Writes gradients as the distributed optimizer of 64 ranks holds them: equal ranges of one buffer of all.

    Most parameters lie in one rank's range, and those at its ends in two.
    """
    share = -(-num_parameters * numel // MODEL_RANKS)
    for rank in range(MODEL_RANKS):
        place = RankPlace(global_rank=rank, coordinates={"tp": 0, "pp": 0, "dp": rank})
        sink = FullSink(path, step=0, place=place, world_size=MODEL_RANKS)
        for number in range(rank * share // numel, min(-(-(rank + 1) * share // numel), num_parameters)):
            start, stop = (min(max(rank * share + end * share - number * numel, 0), numel) for end in (0, 1))
            spec = ShardSpec(
                name=f"parameters.{number}.weight",
                global_shape=(numel,),
                local_shape=(numel,),
                flat_range=(start, stop),
            )
            values = torch.arange(start, stop, dtype=torch.float32)
            sink.add(TraceEntry(update=0, kind="gradient", spec=spec, tensor=values, dims=("channel",)))
        sink.close(StepFooter())


def _stage_of(prefix: str, name: str, num_layers: int) -> int:
    """Tells the pipeline stage of a weight."""
    if prefix:
        return int(prefix.split(".")[2]) * PP // num_layers
    return 0 if name.startswith("embedding") else PP - 1


def _gradient(spec: ShardSpec, *, seed: int) -> TraceEntry:
    """Makes a piece whose values repeat one block of a million numbers, since drawing billions takes long."""
    numel = math.prod(spec.local_shape)
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed)).bfloat16()
    values = block.repeat(-(-numel // len(block)))[:numel].view(spec.local_shape)
    dims: tuple[DimName, ...] = ("row", "column")
    return TraceEntry(update=0, kind="gradient", spec=spec, tensor=values, dims=dims[: len(spec.global_shape)])
