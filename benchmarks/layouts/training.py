"""Trains each case once, in one process group for each number of processes: importing costs more than training.

``torchrun ... -m benchmarks.layouts.training FOLDER CASE ...`` is such a group. Each case, named
``model/precision/layout/option``, leaves in ``FOLDER/{case}`` the metrics of all steps, equal on all ranks, and a trace
of all gradients and parameters. Nothing is judged here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.layouts.cases import LONGEST_ROW, SEED, Case, build_config
from benchmarks.layouts.rows import NUM_ACTIONS, VOCAB_SIZE, random_batch
from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.support.text import count_of
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.learner import Learner
from pipelines.megatron.probing.step_probe import StepProbe
from pipelines.megatron.process.runtime import build_layout, leave_layout, start_runtime, stop_runtime

METRICS_FILE = "metrics.json"
_QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class LayoutRunError(RuntimeError):
    """The processes of one world size failed; the message has the end of their output."""


def run_cases(root: Path, cases: Iterable[Case], console: Console) -> None:
    """Train every case and its reference, each once, into ``root/{case}``.

    Raises:
        LayoutRunError: a process failed.
    """
    by_size: dict[int, dict[str, None]] = {}
    for case in cases:
        for needed in (case.reference, case):
            by_size.setdefault(needed.world_size, {})[needed.name] = None
    for world_size, names in sorted(by_size.items()):
        processes, runs = count_of(world_size, "process", "processes"), count_of(len(names), "run", "runs")
        console.print(f"{processes}: {runs}")
        _run(root, world_size, list(names))


def _run(root: Path, world_size: int, names: Sequence[str]) -> None:
    program = ["-m", "benchmarks.layouts.training", str(root), *names]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command = [sys.executable, *([] if world_size == 1 else torchrun), *program]
    environ = {**os.environ, **_QUIET, **({"RANK": "0", "WORLD_SIZE": "1"} if world_size == 1 else {})}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise LayoutRunError(f"{world_size} processes ended with {result.returncode}:\n{result.stderr[-3000:]}")


def train_case(folder: Path, config: PipelineConfig) -> None:
    """Train the steps of one case, from the canonical initial weights. Every rank must call it."""
    runtime = build_layout(config.parallel, seed=SEED)
    learner = Learner(config, runtime, vocab_size=VOCAB_SIZE, allowed_tokens=list(range(2, 2 + NUM_ACTIONS)))
    steps: list[dict[str, float]] = []
    for step in range(config.max_steps):
        batch = random_batch(SEED + step, longest=LONGEST_ROW, form=config.rollout_form)
        with StepProbe(runtime, folder, step=step, config=TraceConfig(level="full")) as probe:
            steps.append(learner.train_step(batch, step=step, probe=probe))
    if runtime.is_writer:
        (folder / METRICS_FILE).write_text(json.dumps(steps), encoding="utf-8")
    dist.barrier()


def main() -> None:
    """Train all cases of the command line, in order."""
    root = Path(sys.argv[1])
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    configs = {name: build_config(Case.parse(name)) for name in sys.argv[2:]}
    start_runtime(next(iter(configs.values())).parallel, seed=SEED)
    leave_layout()
    for name, config in configs.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        train_case(folder, config)
        leave_layout()
    stop_runtime()


if __name__ == "__main__":
    main()
