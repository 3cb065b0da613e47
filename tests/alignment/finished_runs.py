"""Finished runs as an alignment leaves them, without running anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.trace.entries import TraceEntry
from mock_scheduler.trace.shards import whole
from pipelines.config.loading import load_config
from pipelines.program import PROGRAM
from tests.rank_traces import save_rank_trace

CONFIG = "exp_name: lake\nmax_steps: 2\n"
RECORD, REPLAY = "dump", "mock"


def plan_run(
    folder: Path,
    name: str,
    *overrides: str,
    mode: str = REPLAY,
    entry: str = "pipelines.agentic",
    sources: Sequence[Path] = (),
) -> PlannedRun:
    """A run of a small configuration in ``{folder}/{name}``, on ``{folder}/recording``."""
    (folder / "lake.yaml").write_text(CONFIG)
    complete = (
        *("rollout_mock.enable=true", f"rollout_mock.mode={mode}", f"rollout_mock.dump_dir={folder}/recording"),
        *(f"output_dir={folder}/{name}", f"exp_name=lake-{name}", *overrides),
    )
    return PlannedRun(
        program=PROGRAM,
        name=name,
        entry=entry,
        own_overrides=overrides,
        overrides=complete,
        config=load_config("lake", config_path=folder, overrides=complete),
        output_dir=folder / name,
        python=sys.executable,
        versions={"python": "3.11.2", "torch": "2.13.0"},
        sources=tuple(sources),
    )


def finish(run: PlannedRun, *, gradient: float = 1.0) -> None:
    """What a completed run leaves."""
    run.output_dir.mkdir(parents=True, exist_ok=True)
    entry = TraceEntry(update=0, kind="gradient", spec=whole("decoder.weight", (2,)), tensor=torch.full((2,), gradient))
    for step in range(2):
        save_rank_trace(
            run.output_dir / "trace", step=step, global_rank=0, world_size=1, coordinates={"tp": 0}, entries=[entry]
        )
    for name, content in (("run.json", {"status": "completed"}), ("ledger.json", {"built": {}})):
        (run.output_dir / name).write_text(json.dumps(content))
    (run.output_dir / "config.yaml").write_text("seed: 1\n")
    (run.output_dir / "metrics.jsonl").write_text("{}\n")
    leave_no_own_code(run.output_dir)


def leave_no_own_code(output_dir: Path) -> None:
    """The record of a run whose code is all installed or the project's own."""
    (output_dir / "code").mkdir(exist_ok=True)
    (output_dir / "code" / "record.json").write_text(json.dumps({"files": {}, "calls": {}}))
