"""Compares a case's training with its reference of one process: metrics, gradients and parameters of all steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.layouts.training import METRICS_FILE
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import MergedTensor, open_trace

# A metric may be a difference of nearly equal numbers: it is judged against their size, not its own.
_ABSOLUTE_SCALE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The largest relative difference of some values, and where it is."""

    value: float
    place: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseComparison:
    """Relative differences between a case's training and the reference.

    ``metrics``: by name, |a - b| / max(|a|, |b|, 1e-3), the largest of all steps. The others are the largest
    ||a - b|| / ||b|| of any tensor, with its name: ``first_gradient`` of the first update, which all begin with equal
    parameters, ``gradient`` and ``parameter`` of all updates. ``num_conflicts``: replicas within the run that are not
    equal to the last bit. ``num_tensors``: how many were compared.
    """

    metrics: Mapping[str, float]
    first_gradient: Difference
    gradient: Difference
    parameter: Difference
    num_conflicts: int
    num_tensors: int

    def worst(self) -> float:
        """Return the largest of all differences."""
        return max([*self.metrics.values(), self.gradient.value, self.parameter.value])


def compare_cases(reference_dir: Path, candidate_dir: Path) -> CaseComparison:
    """Compare two trained cases.

    Raises:
        ValueError: they hold other metrics or other tensors; the message says which.
    """
    differences: dict[TraceKey, float] = {}
    num_conflicts = 0
    for key, reference, candidate in merged_pairs(reference_dir, candidate_dir):
        differences[key] = relative_difference(reference.tensor, candidate.tensor)
        num_conflicts += len(candidate.conflicts)
    gradients = {key: value for key, value in differences.items() if key.kind == "gradient"}
    return CaseComparison(
        metrics=_compare_metrics(read_metrics(reference_dir), read_metrics(candidate_dir)),
        first_gradient=_worst((key, value) for key, value in gradients.items() if is_first_update(key)),
        gradient=_worst(gradients.items()),
        parameter=_worst((key, value) for key, value in differences.items() if key not in gradients),
        num_conflicts=num_conflicts,
        num_tensors=len(differences),
    )


def merged_pairs(reference_dir: Path, candidate_dir: Path) -> Iterator[tuple[TraceKey, MergedTensor, MergedTensor]]:
    """Yield every tensor of both traces, put together from all ranks, one at a time.

    Raises:
        ValueError: one trace has other tensors, or other steps.
    """
    with open_trace(reference_dir) as reference, open_trace(candidate_dir) as candidate:
        if reference.steps != candidate.steps:
            raise ValueError(f"steps {reference.steps} and {candidate.steps} cannot be compared")
        for step in reference.steps:
            keys = reference.keys(step)
            if keys != candidate.keys(step):
                names = sorted({key.name for key in keys ^ candidate.keys(step)})
                raise ValueError(f"step {step}: tensors of one run only: {', '.join(names[:5])}")
            for key in sorted(keys, key=str):
                yield key, reference.merge(key), candidate.merge(key)


def is_first_update(key: TraceKey) -> bool:
    """Whether a tensor belongs to the run's first update."""
    return (key.step, key.update) == (0, 0)


def relative_difference(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """Compute ||a - b|| / ||b|| in float64, or ||a - b|| where the reference is 0."""
    difference = float((candidate.double() - reference.double()).norm())
    scale = float(reference.double().norm())
    return difference / scale if scale > 0 else difference


def _worst(differences: Iterable[tuple[TraceKey, float]]) -> Difference:
    """Find the largest difference; NaN counts as the largest of all."""
    worst = Difference(value=0.0, place="-")
    for key, value in differences:
        size = math.inf if math.isnan(value) else value
        if size > worst.value:
            worst = Difference(value=size, place=key.name)
    return worst


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Read the metrics of each step."""
    steps: list[dict[str, float]] = json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
    return steps


def _compare_metrics(reference: list[dict[str, float]], candidate: list[dict[str, float]]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for one, other in zip(reference, candidate, strict=True):
        if one.keys() != other.keys():
            raise ValueError(f"metrics of one run only: {', '.join(sorted(one.keys() ^ other.keys()))}")
        for name, value in one.items():
            scale = max(abs(value), abs(other[name]), _ABSOLUTE_SCALE)
            difference = abs(value - other[name]) / scale
            worst[name] = math.inf if math.isnan(difference) else max(worst.get(name, 0.0), difference)
    return worst
