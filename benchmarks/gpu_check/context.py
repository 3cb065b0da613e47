"""Holds what a check is given: its device, its folder, the machine, and the log of its findings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_check.findings import FindingsLog
from benchmarks.gpu_check.machine import Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckContext:
    """Holds the surroundings of one check. folder: its own, removed when it ends."""

    machine: Machine
    folder: Path
    log: FindingsLog

    @property
    def device(self) -> torch.device:
        """Returns the device to compute on."""
        return torch.device(self.machine.device)

    @property
    def is_gpu(self) -> bool:
        """Whether this is no rehearsal."""
        return self.machine.device == "cuda"

    @property
    def at_once(self) -> int:
        """Returns how many runs may compute beside each other."""
        return max(1, min(8, (os.cpu_count() or 1) // 2)) if self.is_gpu else 1
