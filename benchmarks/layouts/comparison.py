"""Compares a case's training with its reference of one process: metrics, gradients and parameters of all steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.layouts.cases import Case
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Bounds of relative differences: of the first update's gradients, and of anything."""

    first_gradient: float
    anything: float


BOUNDS = {
    "float32": Bounds(first_gradient=2e-5, anything=1e-4),
    "float64": Bounds(first_gradient=1e-12, anything=1e-12),
}
"""Gradients of the first update differ by the rounding of one forward and backward pass (float32: 4e-6 measured).
After that, Adam's step turns a gradient near 0 into one of full size, so that float32 leaves more (2e-5). float64 tells
rounding from a wrong computation, which it does not shrink."""

_METRICS = {
    "loss": ("total_loss",),
    "entropy": ("entropy",),
    "kl": ("kl_loss", "approx_kl"),
    "experts": ("moe/load_balancing_loss", "moe/z_loss", "moe/max_expert_load", "moe/routed_tokens"),
    "grad norm": ("grad_norm",),
}
_TENSORS = ("1st gradients", "gradients", "params")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """One case, and how far it is from its reference."""

    case: Case
    comparison: CaseComparison

    @property
    def is_aligned(self) -> bool:
        """Whether all differences are within the precision's bounds (0 for what keeps bits), and replicas equal."""
        comparison = self.comparison
        if comparison.num_conflicts > 0 or comparison.num_tensors == 0:
            return False
        if self.case.is_exact:
            return comparison.worst() == 0.0
        bounds = BOUNDS[self.case.precision]
        return comparison.first_gradient.value <= bounds.first_gradient and comparison.worst() <= bounds.anything

    def metric(self, name: str) -> float | None:
        """Find the largest difference of a column's metrics; ``None`` where the run has none of them."""
        found = [self.comparison.metrics[metric] for metric in _METRICS[name] if metric in self.comparison.metrics]
        return max(found) if found else None

    def as_json(self) -> dict[str, object]:
        """Return all numbers by name."""
        comparison = self.comparison
        tensors = {
            "first_gradient": comparison.first_gradient,
            "gradient": comparison.gradient,
            "parameter": comparison.parameter,
        }
        return {
            "model": self.case.model,
            "precision": self.case.precision,
            "layout": self.case.layout,
            "option": self.case.option,
            "is_aligned": self.is_aligned,
            "is_exact": self.case.is_exact,
            "metrics": dict(comparison.metrics),
            **{name: {"value": worst.value, "name": worst.place} for name, worst in tensors.items()},
            "num_conflicts": comparison.num_conflicts,
            "num_tensors": comparison.num_tensors,
        }


def build_results(root: Path, cases: Iterable[Case]) -> list[CaseResult]:
    """Compare every case trained by ``run_cases`` with its reference."""
    return [
        CaseResult(case=case, comparison=compare_cases(root / case.reference.name, root / case.name)) for case in cases
    ]


def render(model: str, results: Sequence[CaseResult]) -> Table:
    """Make the table: a row per case of the model, columns of largest relative differences from one process."""
    own = [result for result in results if result.case.model == model]
    metrics = [name for name in _METRICS if any(result.metric(name) is not None for result in own)]
    table = Table(title=f"{model}: largest relative difference from one process, 2 steps of 2 updates")
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    table.add_column("precision", no_wrap=True)
    for name in (*metrics, *_TENSORS):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("replicas", no_wrap=True)
    previous: Case | None = None
    for result in own:
        case = result.case
        is_next = previous is None or previous.label != case.label
        if is_next and previous is not None and previous.world_size != case.world_size:
            table.add_section()
        place = [str(case.world_size), case.label] if is_next else ["", ""]
        table.add_row(*place, *_cells(result, metrics), style=None if result.is_aligned else "red")
        previous = case
    return table


def _cells(result: CaseResult, metrics: Sequence[str]) -> list[str]:
    comparison = result.comparison
    tensors = (comparison.first_gradient, comparison.gradient, comparison.parameter)
    values = [*(result.metric(name) for name in metrics), *(worst.value for worst in tensors)]
    numbers = ["-" if value is None else "0" if value == 0 else f"{value:.0e}" for value in values]
    replicas = "equal" if comparison.num_conflicts == 0 else f"{comparison.num_conflicts} differ"
    return [result.case.precision, *numbers, replicas]
