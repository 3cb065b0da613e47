"""Traces of a training that nobody told its rows, in any layout: rows are by content, each rank lists its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from mock_scheduler.config.instruments import AttachedRun, PerturbationConfig, TraceConfig, TraceKind
from mock_scheduler.support.run_files import CONFIG_FILE, LEDGER_FILE, METRICS_FILE, RUN_FILE, TRACE_FOLDER
from mock_scheduler.trace.entries import VIRTUAL_TOKENS, DimName, RankPlace, RowTable, StepFooter, TraceEntry
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import ShardSpec, Split, blocks_of_indices, whole
from mock_scheduler.trace.sketch.files import SketchSink

HIDDEN = "decoder.layers.0"
LOSS = "lm_loss"
NORM = "decoder.final_layernorm.weight"
WIDTH = 6

KINDS: tuple[TraceKind, ...] = ("initial", "input", "activation", "loss", "gradient", "parameter")
LAYOUT = {"tp": 0, "pp": 0, "dp": 0, "cp": 0}

Piece = tuple[str, Sequence[int]]
"""A row, and the positions that a micro-batch has of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContentRank:
    """One rank: its place, its micro-batches in order, and the columns of hidden values that it holds (all)."""

    coordinates: Mapping[str, int]
    micro_batches: Sequence[Sequence[Piece]]
    columns: Sequence[int] = tuple(range(WIDTH))


@dataclass(frozen=True, kw_only=True, slots=True)
class ContentStep:
    """The values of one step, by row: tokens, hidden values ``[n, WIDTH]`` and losses; and one gradient."""

    tokens: Mapping[str, Sequence[int]]
    hidden: Mapping[str, torch.Tensor]
    loss: Mapping[str, torch.Tensor]
    gradient: torch.Tensor = field(default_factory=lambda: torch.arange(1.0, WIDTH + 1))
    more: Sequence[TraceEntry] = ()

    def changed(self, row: str, position: int, column: int, by: float) -> ContentStep:
        """The step with one other hidden value."""
        hidden = {name: values.clone() for name, values in self.hidden.items()}
        hidden[row][position, column] += by
        return replace(self, hidden=hidden)


def content_step(tokens: Mapping[str, Sequence[int]], *, seed: int = 0) -> ContentStep:
    """A step with values that follow from a seed and each row's tokens alone."""
    hidden, loss = {}, {}
    for name, ids in tokens.items():
        random = torch.Generator().manual_seed(seed * 1000 + sum(ids))
        hidden[name] = torch.randn(len(ids), WIDTH, generator=random)
        loss[name] = torch.rand(len(ids), generator=random)
    return ContentStep(tokens=tokens, hidden=hidden, loss=loss)


def one_rank(step: ContentStep) -> list[ContentRank]:
    """The whole batch on one rank, a micro-batch for each row."""
    batches = [[(name, range(len(ids)))] for name, ids in step.tokens.items()]
    return [ContentRank(coordinates=LAYOUT, micro_batches=batches)]


def table_of(rank: ContentRank, step: ContentStep) -> RowTable:
    """The rows that a rank meets, in the order in which it meets them."""
    names = list(dict.fromkeys(name for batch in rank.micro_batches for name, _ in batch))
    return RowTable.by_content(names, [len(step.tokens[name]) for name in names])


def save_content_trace(
    trace_dir: Path,
    step: ContentStep,
    ranks: Sequence[ContentRank] | None = None,
    *,
    number: int = 0,
    level: str = "full",
    kinds: Sequence[TraceKind] = KINDS,
) -> Path:
    """Write one step of all ranks; each lists its own rows."""
    ranks = one_rank(step) if ranks is None else ranks
    for index, rank in enumerate(ranks):
        place = RankPlace(global_rank=index, coordinates=rank.coordinates)
        opened = FullSink if level == "full" else SketchSink
        sink = opened(trace_dir, step=number, place=place, world_size=len(ranks))
        rows = table_of(rank, step)
        for batch in rank.micro_batches:
            for entry in _entries(batch, rows, rank, step, kinds):
                sink.add(entry)
        weights = torch.ones(WIDTH)
        state: Mapping[TraceKind, torch.Tensor] = {
            "initial": weights,
            "gradient": step.gradient,
            "parameter": weights - 0.25 * step.gradient,
        }
        for kind, tensor in state.items():
            if kind in kinds:
                sink.add(TraceEntry(update=0, kind=kind, spec=whole(NORM, (WIDTH,)), tensor=tensor, dims=("channel",)))
        for more in step.more:
            sink.add(more)
        sink.close(StepFooter(rows=rows, update_rows=(tuple(range(len(rows.lengths))),), kinds=tuple(kinds)))
    return trace_dir


def _entries(
    batch: Sequence[Piece], rows: RowTable, rank: ContentRank, step: ContentStep, kinds: Sequence[TraceKind]
) -> list[TraceEntry]:
    start_of = dict(zip(rows.identities, rows.starts, strict=True))
    places = [(start_of[name] + position, name, position) for name, positions in batch for position in positions]
    # Pieces are in canonical order, as attach writes them.
    places.sort()
    split = Split(dim=0, blocks=blocks_of_indices([place for place, _, _ in places]))
    columns = Split(dim=1, blocks=blocks_of_indices(rank.columns))
    by_kind: Mapping[TraceKind, tuple[str, torch.Tensor]] = {
        "input": ("tokens", torch.tensor([step.tokens[name][position] for _, name, position in places])),
        "activation": (HIDDEN, torch.stack([step.hidden[name][position] for _, name, position in places])),
        "loss": (LOSS, torch.stack([step.loss[name][position] for _, name, position in places])),
    }
    entries = []
    for kind, (name, values) in by_kind.items():
        if kind not in kinds:
            continue
        is_wide = values.dim() > 1
        local = values[:, list(rank.columns)] if is_wide else values
        spec = ShardSpec(
            name=name,
            global_shape=(VIRTUAL_TOKENS, *values.shape[1:]),
            local_shape=tuple(local.shape),
            splits=(split, columns) if is_wide and len(rank.columns) < WIDTH else (split,),
        )
        dims: tuple[DimName, ...] = ("token", "channel") if is_wide else ("token",)
        entries.append(TraceEntry(update=0, kind=kind, spec=spec, tensor=local, dims=dims))
    return entries


def save_content_run(
    output_dir: Path,
    step: ContentStep,
    ranks: Sequence[ContentRank] | None = None,
    *,
    level: Literal["full", "sketch"] = "full",
    kinds: Sequence[TraceKind] = KINDS,
    loss: float = 2.5,
    batch: str = "b0",
    perturbation: int | None = None,
) -> Path:
    """Write the folder of a finished run of one step, as a training that the instruments are attached to leaves it."""
    output_dir.mkdir()
    config = AttachedRun(
        output_dir=str(output_dir),
        system_envs={"DETERMINISTIC_MODE": "1"},
        trace=TraceConfig(level=level, kinds=list(kinds)),
        perturbation=PerturbationConfig(seed=perturbation),
    )
    files = {
        CONFIG_FILE: config.model_dump(mode="json"),
        METRICS_FILE: {"step": 0, "metrics": {"loss": loss, "grad_norm": 1.5, "lr": 1e-3}},
        RUN_FILE: {"status": "completed", "layout": "tp1", "wall_s": 1.0, "rollout_s": 0.0, "batches": {"0": batch}},
        LEDGER_FILE: {"built": {}},
    }
    for name, content in files.items():
        (output_dir / name).write_text(json.dumps(content) + "\n")
    save_content_trace(output_dir / TRACE_FOLDER, step, ranks, level=level, kinds=kinds)
    return output_dir
