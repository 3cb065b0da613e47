"""Runs one check in this process: ``python -m benchmarks.gpu_check.one_check NAME MACHINE FOLDER FINDINGS``."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.findings import FindingsLog
from benchmarks.gpu_check.machine import Machine
from mock_scheduler.determinism.guard import apply_deterministic_mode


def main() -> None:
    """Runs the check; its exit code is 0 unless it broke off."""
    name, machine, folder, findings = sys.argv[1:]
    apply_deterministic_mode(os.environ)
    context = CheckContext(
        machine=Machine.of_json(json.loads(Path(machine).read_text(encoding="utf-8"))),
        folder=Path(folder),
        log=FindingsLog(Path(findings)),
    )
    importlib.import_module(f"benchmarks.gpu_check.{name}").check(context)


if __name__ == "__main__":
    main()
