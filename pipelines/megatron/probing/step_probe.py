"""Writes what a training step shows of itself, in the canonical form of the trace.

Reading changes nothing: tensors are copied, and no probe runs where the trace is off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.trace import TraceConfig, TraceKind
from mock_scheduler.trace.entries import StepFooter, TraceEntry
from mock_scheduler.trace.files import save_rank_trace
from mock_scheduler.trace.shards import ShardSpec
from pipelines.megatron.places import OwnBatch
from pipelines.megatron.probing.interface import TrainingProbe
from pipelines.megatron.runtime import Runtime
from pipelines.megatron.trained_model import TrainedModel
from pipelines.megatron.weights import LocalParameter

_Piece = tuple[ShardSpec, torch.Tensor]


class StepProbe(TrainingProbe):
    """Collects what one rank traces of one step; ``save`` writes it. Every rank makes and saves its own."""

    def __init__(self, runtime: Runtime, trace_dir: Path, *, step: int, config: TraceConfig) -> None:
        self._runtime = runtime
        self._trace_dir = trace_dir
        self._step = step
        self._config = config
        self._entries: list[TraceEntry] = []

    def start_step(self, batch: RolloutBatch, batches: Sequence[OwnBatch], models: Sequence[TrainedModel]) -> None:
        """Begin with the parameters before the first update."""
        for model in models:
            self.state(model, 0, "initial")

    def state(self, model: TrainedModel, update: int, kind: TraceKind) -> None:
        """Copy a model's main gradients after the reduction, or its parameters before or after an update."""
        if kind == "parameter":
            model.gather_parameters()
        distributed = [item for item in model.optimizers if isinstance(item, DistributedOptimizer)]
        for local in model.parameters():
            pieces = _gradients(local, distributed) if kind == "gradient" else _parameters(local, distributed)
            self._add(update, kind, pieces)
            if kind == "parameter" and local.parameter.dtype is torch.bfloat16:
                self._add(update, "weight", [(local.spec, local.parameter)])

    def _add(self, update: int, kind: TraceKind, pieces: Iterator[_Piece] | list[_Piece]) -> None:
        for spec, tensor in pieces:
            copied = tensor.detach().to("cpu", copy=True)
            self._entries.append(TraceEntry(update=update, kind=kind, spec=spec, tensor=copied))

    def save(self) -> None:
        """Write this rank's file of the step."""
        runtime = self._runtime
        save_rank_trace(
            self._trace_dir,
            step=self._step,
            global_rank=runtime.global_rank,
            world_size=runtime.world_size,
            coordinates=runtime.coordinates,
            entries=self._entries,
            footer=StepFooter(kinds=tuple(self._config.kinds), patterns=tuple(self._config.patterns)),
        )


def _gradients(local: LocalParameter, distributed: Sequence[DistributedOptimizer]) -> Iterator[_Piece]:
    """The local shard; with the distributed optimizer only the range of it that this rank has reduced."""
    if not distributed:
        yield local.spec, local.parameter.main_grad
    for optimizer in distributed:
        spec = _owned_range(optimizer, local)
        if spec is not None:
            yield spec, local.parameter.main_grad


def _parameters(local: LocalParameter, distributed: Sequence[DistributedOptimizer]) -> Iterator[_Piece]:
    """The parameter in the precision in which it is updated: itself, or of bfloat16 ones the optimizer's copy."""
    if local.parameter.dtype is not torch.bfloat16:
        yield local.spec, local.parameter
        return
    if not distributed:
        yield local.spec, local.parameter.main_param
    for optimizer in distributed:
        spec = _owned_range(optimizer, local)
        if spec is not None:
            group, position = optimizer.model_param_group_index_map[local.parameter]
            yield spec, optimizer.optimizer.param_groups[group]["params"][position]


def _owned_range(optimizer: DistributedOptimizer, local: LocalParameter) -> ShardSpec | None:
    """The shard with the range that this rank owns; ``None`` where another rank owns all of it.

    A parameter is in the maps of its own optimizer, and there only on ranks that own a part of its bucket.
    """
    place = optimizer.model_param_gbuf_map.get(local.parameter)
    if place is None:
        return None
    index, dtype, bucket = place
    ranges = optimizer.gbuf_ranges[index][dtype][bucket]["param_map"].get(local.parameter)
    if ranges is None:
        return None
    owned = ranges["param"]
    return replace(local.spec, flat_range=(owned.start, owned.end))
