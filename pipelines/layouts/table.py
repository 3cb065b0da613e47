"""Results of all layouts as one table per model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from pipelines.layouts.cases import ONE_PROCESS
from pipelines.layouts.comparison import LayoutComparison, compare_layout
from pipelines.layouts.runs import layouts_of

PRECISIONS = ("float32", "float64")
BOUNDS = {"float32": 2e-3, "float64": 1e-12}
"""Of the largest relative difference. After three updates by Adam, whose step turns a gradient near 0 into one of full
size, float32 leaves 1e-5 to 1e-3; float64 separates rounding from a wrong computation, which it does not shrink."""

_COLUMNS = {
    "loss": ("total_loss",),
    "entropy": ("entropy",),
    "kl": ("kl_loss", "approx_kl"),
    "experts": ("moe/load_balancing_loss", "moe/z_loss", "moe/max_expert_load", "moe/routed_tokens"),
    "grad norm": ("grad_norm",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutResult:
    """One layout of one model in one precision."""

    model: str
    precision: str
    layout: str
    comparison: LayoutComparison

    @property
    def is_aligned(self) -> bool:
        """Whether all differences are within the precision's bound, and replicas equal to the last bit."""
        return self.comparison.worst() <= BOUNDS[self.precision] and self.comparison.num_conflicts == 0

    def column(self, name: str) -> float | None:
        """The largest difference of a column's metrics; ``None`` where the run has none of them."""
        found = [self.comparison.metrics[metric] for metric in _COLUMNS[name] if metric in self.comparison.metrics]
        return max(found) if found else None

    def as_json(self) -> dict[str, object]:
        """All numbers by name."""
        comparison = self.comparison
        return {
            "model": self.model,
            "precision": self.precision,
            "layout": self.layout,
            "is_aligned": self.is_aligned,
            "metrics": dict(comparison.metrics),
            "gradient": {"value": comparison.gradient.value, "name": comparison.gradient.place},
            "parameter": {"value": comparison.parameter.value, "name": comparison.parameter.place},
            "num_conflicts": comparison.num_conflicts,
            "num_tensors": comparison.num_tensors,
        }


def build_results(
    root: Path, models: Sequence[str], precisions: Sequence[str], *, max_world_size: int
) -> list[LayoutResult]:
    """Every layout but one process, compared with one process of the same model and precision."""
    return [
        LayoutResult(
            model=model,
            precision=precision,
            layout=layout,
            comparison=compare_layout(root / model / precision / ONE_PROCESS, root / model / precision / layout),
        )
        for model in models
        for layout in layouts_of(model, max_world_size)[1:]
        for precision in precisions
    ]


def render(model: str, layouts: Sequence[str], results: Sequence[LayoutResult]) -> Table:
    """Rows are layouts, columns the largest relative differences from one process; float32 above float64."""
    table = Table(title=f"{model}: largest relative difference from one process, 2 steps of 2 updates")
    table.add_column("layout", no_wrap=True)
    table.add_column("precision")
    for name in (*_COLUMNS, "gradients", "parameters"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("replicas")
    for layout in layouts:
        for result in (item for item in results if (item.model, item.layout) == (model, layout)):
            table.add_row(*_cells(result), style=None if result.is_aligned else "red")
        table.add_section()
    return table


def _cells(result: LayoutResult) -> list[str]:
    comparison = result.comparison
    values = [result.column(name) for name in _COLUMNS] + [comparison.gradient.value, comparison.parameter.value]
    numbers = ["-" if value is None else "0" if value == 0 else f"{value:.0e}" for value in values]
    replicas = "equal" if comparison.num_conflicts == 0 else f"{comparison.num_conflicts} differ"
    return [result.layout, result.precision, *numbers, replicas]
