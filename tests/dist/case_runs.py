"""Trains cases of ``benchmarks.layouts`` for a test, and compares them with one process."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from mock_scheduler.display.console import Console

from benchmarks.layouts.cases import Case
from benchmarks.layouts.comparison import CaseResult, build_results
from benchmarks.layouts.training import run_cases


def train(root: Path, cases: Sequence[Case]) -> None:
    """One launch of real gloo processes for each number of processes; a failure shows the end of what they said."""
    run_cases(root, cases, Console(file=io.StringIO()))


def train_and_compare(root: Path, cases: Sequence[Case]) -> dict[str, CaseResult]:
    """The results by the case's name."""
    train(root, cases)
    return {result.case.name: result for result in build_results(root, cases)}


def describe_unaligned(results: Sequence[CaseResult]) -> list[str]:
    """Every case that is not aligned, with its worst numbers."""
    return [
        f"{result.case.name}: {result.comparison.worst():.1e}, first gradient "
        f"{result.comparison.first_gradient.value:.1e} ({result.comparison.first_gradient.place}), "
        f"{result.comparison.num_conflicts} conflicts"
        for result in results
        if not result.is_aligned
    ]
