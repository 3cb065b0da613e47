"""Runs the attached example where ranks may outnumber GPUs, with the fault that its run is named after, if any."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu_check.one_gpu import share_gpus
from tests.faults.own import train_with_fault

if __name__ == "__main__":
    share_gpus()
    train_with_fault.main()
