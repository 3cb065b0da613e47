"""Traces one training step of cases of ``benchmarks.layouts``: ``-m tests.dist.workers.trace_worker FOLDER TASK ...``.

A task is a case, of which ``FOLDER/{case}`` gets everything that modules compute, or another form of it, a colon and a
case, with results in ``FOLDER/{form}/{case}``. Forms: ``state``, gradients and parameters alone; ``full``, both;
``fault``, layer 2 leaves out a reduction; ``rows``, in a file ``{case}.safetensors`` what the modules of the untrained
model give for each row on its own, as ``tests.pipelines.workers.plain_forward`` has it. ``probe:`` and a task of
``probe_tasks`` writes to ``FOLDER/probe/{task}``. The first task is a case. Nothing is judged here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from benchmarks.layouts.cases import LONGEST_ROW, SEED, Case, build_config
from benchmarks.layouts.training import NUM_ACTIONS, VOCAB_SIZE, random_batch
from mock_scheduler.config.instruments import LedgerKind, TraceConfig, TraceKind
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.learner import Learner
from mock_scheduler.megatron.observed_model import unwrapped
from mock_scheduler.megatron.probe.step_probe import StepProbe
from pipelines.megatron.process_of_rank import build_layout, leave_layout, start_runtime, stop_runtime
from tests.dist.workers import probe_tasks
from tests.pipelines.workers.plain_forward import forward_by_row

MODULES: list[TraceKind | LedgerKind] = ["activation", "router", "logits", "activation_gradient"]
STATE: list[TraceKind | LedgerKind] = ["gradient", "parameter"]
KINDS = {"": MODULES, "fault": MODULES, "state": STATE, "full": [*MODULES, *STATE]}


def run_task(root: Path, task: str) -> None:
    """One task, from the canonical initial weights. Every rank must call it."""
    form, _, name = task.rpartition(":")
    if form == "probe":
        probe_tasks.run_task(root / form, name)
        dist.barrier()
        return
    config = build_config(Case.parse(name))
    runtime = build_layout(config.parallel, seed=SEED)
    learner = Learner(config, runtime, vocab_size=VOCAB_SIZE, allowed_tokens=list(range(2, 2 + NUM_ACTIONS)))
    batch = random_batch(SEED, longest=LONGEST_ROW, form=config.rollout_form)
    if form == "fault":
        leave_out_reduction(learner)
    if form == "rows":
        path = root / form / f"{name}.safetensors"
        path.parent.mkdir(parents=True)
        save_file(forward_by_row(learner.policy.policy.chunks[0], batch), path)
    else:
        trace = TraceConfig(level="full", kinds=KINDS[form])
        with StepProbe(runtime, root / form / name, step=0, config=trace) as probe:
            learner.train_step(batch, probe=probe)
    dist.barrier()


def leave_out_reduction(learner: Learner) -> None:
    """Let layer 2 of the policy hand on what is this tp rank's part of a gradient alone."""
    linear = unwrapped(learner.policy.policy.chunks[0]).decoder.layers[2].self_attention.linear_qkv
    linear.allreduce_dgrad, linear.disable_grad_reduce = False, True


def start(tasks: list[str]) -> None:
    """Join the process group of the first task's world size; the layouts are built one by one."""
    first: PipelineConfig = build_config(Case.parse(tasks[0].rpartition(":")[2]))
    start_runtime(first.parallel, seed=SEED)
    leave_layout()


def main() -> None:
    """All tasks named on the command line, in order."""
    root, tasks = Path(sys.argv[1]), sys.argv[2:]
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    start(tasks)
    for task in tasks:
        run_task(root, task)
        leave_layout()
    stop_runtime()


if __name__ == "__main__":
    main()
