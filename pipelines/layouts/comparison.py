"""How far a layout's training is from that of one process: metrics, gradients and parameters of all steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mock_scheduler.trace.files import TraceKey
from mock_scheduler.trace.reader import open_trace
from pipelines.layouts.worker import METRICS_FILE

# A metric that is a difference of nearly equal numbers is judged against what was subtracted, which is of this size.
_ABSOLUTE_SCALE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The largest relative difference of some values, and where it is."""

    value: float
    place: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutComparison:
    """Relative differences between a layout's training and the reference.

    ``metrics``: by name, |a - b| / max(|a|, |b|, 1e-3), the largest of all steps. ``gradient``, ``parameter``: the
    largest ||a - b|| / ||b|| of any tensor and update, with its name. ``num_conflicts``: replicas within the run that
    are not equal to the last bit. ``num_tensors``: how many were compared.
    """

    metrics: Mapping[str, float]
    gradient: Difference
    parameter: Difference
    num_conflicts: int
    num_tensors: int

    def worst(self) -> float:
        """The largest of all differences."""
        return max([*self.metrics.values(), self.gradient.value, self.parameter.value])


def compare_layout(reference_dir: Path, candidate_dir: Path) -> LayoutComparison:
    """Compare two cases as ``worker`` leaves them.

    Raises:
        ValueError: they hold other metrics or other tensors; the message says which.
    """
    metrics = _compare_metrics(_read_metrics(reference_dir), _read_metrics(candidate_dir))
    with open_trace(reference_dir) as reference, open_trace(candidate_dir) as candidate:
        worst = {"gradient": Difference(value=0.0, place="-"), "parameter": Difference(value=0.0, place="-")}
        num_conflicts = num_tensors = 0
        for step in reference.steps:
            keys = reference.keys(step)
            if keys != candidate.keys(step):
                raise ValueError(f"step {step}: tensors of one run only: {_names(keys ^ candidate.keys(step))}")
            for key in sorted(keys, key=str):
                one, other = reference.merge(key), candidate.merge(key)
                num_conflicts += len(other.conflicts)
                num_tensors += 1
                kind = "gradient" if key.kind == "gradient" else "parameter"
                value = relative_difference(one.tensor, other.tensor)
                if not value <= worst[kind].value:
                    worst[kind] = Difference(value=value, place=key.name)
    return LayoutComparison(
        metrics=metrics,
        gradient=worst["gradient"],
        parameter=worst["parameter"],
        num_conflicts=num_conflicts,
        num_tensors=num_tensors,
    )


def relative_difference(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """||a - b|| / ||b|| in float64, or ||a - b|| where the reference is 0."""
    difference = float((candidate.double() - reference.double()).norm())
    scale = float(reference.double().norm())
    return difference / scale if scale > 0 else difference


def _names(keys: frozenset[TraceKey]) -> str:
    return ", ".join(sorted({key.name for key in keys})[:5])


def _read_metrics(folder: Path) -> list[dict[str, float]]:
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
