"""Starts the layouts of each world size in one process group each, since importing costs more than training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mock_scheduler.config.schema import ParallelConfig
from pipelines.layouts.cases import LAYOUTS, ONE_PROCESS, parallel_of

_WORKER = "pipelines.layouts.worker"
_QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class LayoutRunError(RuntimeError):
    """The processes of one world size failed; the message has the end of what they said."""


def world_size_of(layout: str) -> int:
    """Processes that a layout needs."""
    return ParallelConfig(**parallel_of(layout)).world_size


def layouts_of(model: str, max_world_size: int) -> list[str]:
    """One process first, then all others that fit."""
    return [ONE_PROCESS, *(layout for layout in LAYOUTS[model] if world_size_of(layout) <= max_world_size)]


def run_cases(
    root: Path, models: Sequence[str], precisions: Sequence[str], *, max_world_size: int, console: Console
) -> None:
    """Train every case; its files are in ``root/model/precision/layout``. Raises ``LayoutRunError``."""
    cases: dict[int, list[str]] = {}
    for model in models:
        for layout in layouts_of(model, max_world_size):
            names = [f"{model}/{precision}/{layout}" for precision in precisions]
            cases.setdefault(world_size_of(layout), []).extend(names)
    for world_size, names in sorted(cases.items()):
        console.print(f"{world_size} processes: {len(names)} runs")
        _run(root, world_size, names)


def _run(root: Path, world_size: int, names: Sequence[str]) -> None:
    program = ["-m", _WORKER, str(root), *names]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command = [sys.executable, *([] if world_size == 1 else torchrun), *program]
    environ = {**os.environ, **_QUIET, **({"RANK": "0", "WORLD_SIZE": "1"} if world_size == 1 else {})}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise LayoutRunError(f"{world_size} processes ended with {result.returncode}:\n{result.stderr[-3000:]}")
