"""Shows the results of all cases, one table per model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.layouts.cases import Case
from benchmarks.layouts.comparison import CaseComparison, compare_cases


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
