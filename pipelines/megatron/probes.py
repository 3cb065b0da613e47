"""Writes main gradients and parameters of every update, in the canonical form of the trace.

Reading changes nothing: tensors are copied, and no probe runs where the trace is off.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mock_scheduler.trace.files import TraceEntry, TraceKind, save_rank_trace
from mock_scheduler.trace.shards import ShardSpec
from pipelines.megatron.trainer import PolicyTrainer
from pipelines.megatron.weights import LocalParameter, iterate_parameters


class StepProbe:
    """Collects what one rank traces of one step; ``save`` writes it. Every rank makes and saves its own."""

    def __init__(self, trainer: PolicyTrainer, trace_dir: Path, *, step: int) -> None:
        self._trainer = trainer
        self._trace_dir = trace_dir
        self._step = step
        self._entries: list[TraceEntry] = []

    def __call__(self, update: int, kind: TraceKind) -> None:
        """Copy the main gradients after the reduction, or the parameters after the update."""
        runtime, shape = self._trainer.runtime, self._trainer.shape
        for local in iterate_parameters(self._trainer.policy, shape, runtime):
            spec = self._gradient_spec(local) if kind == "gradient" else local.spec
            if spec is None:
                continue
            tensor = local.parameter.main_grad if kind == "gradient" else local.parameter.detach()
            entry = TraceEntry(update=update, kind=kind, spec=spec, tensor=tensor.to("cpu", copy=True))
            self._entries.append(entry)

    def _gradient_spec(self, local: LocalParameter) -> ShardSpec | None:
        """The local shard; with the distributed optimizer the range of it that this rank has reduced, or ``None``."""
        distributed = [item for item in self._trainer.optimizers if isinstance(item, DistributedOptimizer)]
        if not distributed:
            return local.spec
        # Each parameter is in the map of its optimizer, and there only on ranks that own a part of its bucket.
        ranges = (_owned_range(optimizer, local) for optimizer in distributed)
        return next((owned for owned in ranges if owned is not None), None)

    def save(self) -> None:
        """Write this rank's file of the step."""
        runtime = self._trainer.runtime
        save_rank_trace(
            self._trace_dir,
            step=self._step,
            global_rank=runtime.global_rank,
            world_size=runtime.world_size,
            coordinates=runtime.coordinates,
            entries=self._entries,
        )


def _owned_range(optimizer: DistributedOptimizer, local: LocalParameter) -> ShardSpec | None:
    place = optimizer.model_param_gbuf_map.get(local.parameter)
    if place is None:
        return None
    index, dtype, bucket = place
    ranges = optimizer.gbuf_ranges[index][dtype][bucket]["param_map"].get(local.parameter)
    if ranges is None:
        return None
    owned = ranges["param"]
    return replace(local.spec, flat_range=(owned.start, owned.end))
