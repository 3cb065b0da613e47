"""Starts the cases of each world size in one process group each, since importing costs more than training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.layouts.cases import Case
from mock_scheduler.support.text import count_of

_WORKER = "benchmarks.layouts.worker"
_QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class LayoutRunError(RuntimeError):
    """The processes of one world size failed; the message has the end of what they said."""


def run_cases(root: Path, cases: Iterable[Case], console: Console) -> None:
    """Train every case and what it is compared with, each once; its files are in ``root/{case}``.

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
    program = ["-m", _WORKER, str(root), *names]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command = [sys.executable, *([] if world_size == 1 else torchrun), *program]
    environ = {**os.environ, **_QUIET, **({"RANK": "0", "WORLD_SIZE": "1"} if world_size == 1 else {})}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise LayoutRunError(f"{world_size} processes ended with {result.returncode}:\n{result.stderr[-3000:]}")
