"""Runs the pipeline with a planted fault, and does not let a fault that never fired pass for one that was missed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from pipelines.agentic import main
from tests.faults.counting import Fired

__all__ = ["Fired", "run_with_fault"]


def run_with_fault(plant: Callable[[Fired], None]) -> NoReturn:
    """Run the pipeline, planted after its environment was applied, and end the process with its exit code.

    ``plant`` puts the fault in and lets it count. A run that succeeds without it having fired ends with an error.
    """
    fired = Fired()
    exit_code = main(prepare=lambda: plant(fired))
    if exit_code == 0 and fired.count == 0:
        sys.exit("the fault never fired")
    sys.exit(exit_code)
