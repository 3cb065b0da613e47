"""Trains one step with replayed experts, rightly and wrongly: ``-m tests.pipelines.workers.routing_worker FOLDER``.

Writes a full trace to ``FOLDER/{case}`` for each of ``WRONG`` and for ``right``; nothing is judged here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.layouts.cases import LONGEST_ROW, SEED, Case, build_config
from benchmarks.layouts.training import VOCAB_SIZE, random_batch, with_random_experts
from mock_scheduler.config.instruments import TRACE_KINDS, TraceConfig
from mock_scheduler.megatron.probe.step_probe import StepProbe
from pipelines.megatron.layers.routing import RoutingTable
from pipelines.megatron.learner import Learner
from pipelines.megatron.process_of_rank import build_layout, leave_layout, start_runtime, stop_runtime
from tests.faults.counting import Fired
from tests.faults.fault import Injector
from tests.faults.injectors.patching import replacing

Numbers = Callable[[RoutingTable, torch.Tensor], torch.Tensor]
Replayed = Callable[[RoutingTable, int, torch.Tensor, torch.Tensor], torch.Tensor]


def _of_another_token(shift: int) -> Injector:
    """A replay reads the experts of the token so many places further, in the order of the batch."""

    def wrap(fired: Fired, numbers: Numbers) -> Numbers:
        def shifted(table: RoutingTable, places: torch.Tensor) -> torch.Tensor:
            fired.count += 1
            return (numbers(table, places) + shift) % len(table.experts)

        return shifted

    return replacing(RoutingTable, "_numbers", wrap)


def _of_another_layer(fired: Fired, replayed: Replayed) -> Replayed:
    def exchanged(table: RoutingTable, layer: int, places: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        fired.count += int(layer > 1)
        return replayed(table, {2: 3, 3: 2}.get(layer, layer), places, own)

    return exchanged


WRONG: dict[str, Injector] = {
    "shifted by one": _of_another_token(1),
    "of another token": _of_another_token(37),
    "of another layer": replacing(RoutingTable, "replayed", _of_another_layer),
}


def train(folder: Path, inject: Injector | None) -> None:
    """One step from the canonical initial weights, all its tensors traced."""
    config = build_config(Case(model="moe-by-row", precision="float32", option="one-update+replay"))
    batch = with_random_experts(random_batch(SEED, longest=LONGEST_ROW), config.model, seed=SEED)
    runtime, fired = build_layout(config.parallel, seed=SEED), Fired()
    with nullcontext() if inject is None else inject(fired):
        learner = Learner(config, runtime, vocab_size=VOCAB_SIZE)
        trace = TraceConfig(level="full", kinds=[*TRACE_KINDS])
        with StepProbe(runtime, folder, step=0, config=trace) as probe:
            learner.train_step(batch, step=0, probe=probe)
    assert inject is None or fired.count > 0
    leave_layout()


def main() -> None:
    """All cases, in order."""
    root = Path(sys.argv[1])
    torch.use_deterministic_algorithms(True)
    start_runtime(build_config(Case(model="moe-by-row", precision="float32")).parallel, seed=SEED)
    leave_layout()
    for name, inject in {"right": None, **WRONG, "again": None}.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        train(root / name, inject)
    stop_runtime()


if __name__ == "__main__":
    main()
