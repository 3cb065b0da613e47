"""Trains cases of one world size in one process group: ``torchrun ... -m benchmarks.layouts.worker FOLDER CASE ...``.

A case is ``model/precision/layout/option``. Of each, ``FOLDER/{case}`` gets the metrics of all steps, which all ranks
hold alike, and a trace of all gradients and parameters. Nothing is judged here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.layouts.cases import LONGEST_ROW, SEED, Case, build_config
from benchmarks.layouts.rows import NUM_ACTIONS, VOCAB_SIZE, random_batch
from mock_scheduler.config.trace import TraceConfig
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.learner import Learner
from pipelines.megatron.probing.step_probe import StepProbe
from pipelines.megatron.process.runtime import build_layout, leave_layout, start_runtime, stop_runtime

METRICS_FILE = "metrics.json"


def train_case(folder: Path, config: PipelineConfig) -> None:
    """The steps of one case, from the canonical initial weights. Every rank must call it."""
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
    """All cases named on the command line, in order."""
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
