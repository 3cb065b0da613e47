"""Trains cases of order emulation: ``-m tests.dist.workers.emulation_worker FOLDER CASE ...``.

A case is ``model/precision/layout`` of ``tests.dist.emulation_cases``. In one process it is the run that emulates the
layout, in several the run that has it. ``FOLDER/{case}`` gets metrics and a trace of everything; a fault's name and a
colon before the case plants the fault, with results in ``FOLDER/{fault}/{case}``. Nothing is judged here.
"""

from __future__ import annotations

from typing import Any

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from benchmarks.layouts.cases import LONGEST_ROW, SEED
from benchmarks.layouts.training import NUM_ACTIONS, VOCAB_SIZE, random_batch
from mock_scheduler.config.instruments import TraceConfig
from pipelines.algorithm.losses import PolicyLossOutput, compute_policy_loss
from pipelines.config.schema import PipelineConfig
from pipelines.megatron import logprobs, trainer
from pipelines.megatron.learner import Learner
from mock_scheduler.megatron.probe.step_probe import StepProbe
from mock_scheduler.megatron.ordered_collectives import use_ordered_reductions
from pipelines.megatron.process_of_rank import build_layout, leave_layout, start_runtime, stop_runtime
from tests.dist.emulation_cases import EmulationCase

METRICS_FILE = "metrics.json"


@contextmanager
def replaced(owner: ModuleType | type, name: str, function: Callable[..., object]) -> Iterator[None]:
    """One function of a module or class is another one in the block."""
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


def scale_loss() -> AbstractContextManager[None]:
    """The summed loss of every micro-batch is 0.05 % too large."""
    def scaled(*args: Any) -> PolicyLossOutput:
        output = compute_policy_loss(*args)
        return replace(output, total=output.total * 1.0005)

    return replaced(trainer, "compute_policy_loss", scaled)


def scale_softmax_sum() -> AbstractContextManager[None]:
    """The first tp rank's part of the softmax's denominator is 0.1 % too large; it has all tokens that can be drawn."""
    local_sums = logprobs.local_sums

    def scaled(*args: Any) -> torch.Tensor:
        sums = local_sums(*args)
        if dist.get_rank() == 0:
            sums[0] *= 1.001
        return sums

    return replaced(logprobs, "local_sums", scaled)


def scale_expert_weights() -> AbstractContextManager[None]:
    """What the first rank's experts give is weighted by 0.05 % too much, for tokens of any rank."""
    dispatch = MoEAlltoAllTokenDispatcher.token_dispatch

    def scaled(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, probs = dispatch(*args)
        return tokens, probs * 1.0005 if dist.get_rank() == 0 else probs

    return replaced(MoEAlltoAllTokenDispatcher, "token_dispatch", scaled)


FAULTS = {
    "": nullcontext,
    "loss_scale": scale_loss,
    "softmax_sum": scale_softmax_sum,
    "expert_weights": scale_expert_weights,
}


def train_case(folder: Path, config: PipelineConfig) -> None:
    """The steps of one case, from the canonical initial weights. Every rank must call it."""
    runtime = build_layout(config.parallel, seed=SEED)
    trace = TraceConfig.model_validate({"level": "full", "kinds": "all"})
    with use_ordered_reductions(config.order):
        learner = Learner(config, runtime, vocab_size=VOCAB_SIZE, allowed_tokens=list(range(2, 2 + NUM_ACTIONS)))
        steps: list[dict[str, float]] = []
        for step in range(config.max_steps):
            batch = random_batch(SEED + step, longest=LONGEST_ROW, form=config.rollout_form)
            with StepProbe(runtime, folder, step=step, config=trace) as probe:
                steps.append(learner.train_step(batch, step=step, probe=probe))
    if runtime.is_writer:
        (folder / METRICS_FILE).write_text(json.dumps(steps), encoding="utf-8")
    dist.barrier()


def main() -> None:
    """All cases named on the command line, in order."""
    root = Path(sys.argv[1])
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    emulates = os.environ["WORLD_SIZE"] == "1"
    tasks = {name: EmulationCase.parse(name.rpartition(":")[2]) for name in sys.argv[2:]}
    configs = {name: case.config(emulates=emulates) for name, case in tasks.items()}
    start_runtime(next(iter(configs.values())).parallel, seed=SEED)
    leave_layout()
    for name, config in configs.items():
        fault, _, case = name.rpartition(":")
        folder = root / fault / case
        folder.mkdir(parents=True, exist_ok=True)
        with FAULTS[fault]():
            train_case(folder, config)
        leave_layout()
    stop_runtime()


if __name__ == "__main__":
    main()
