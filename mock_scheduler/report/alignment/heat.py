"""Shades a candidate's differences in tables: parts of the model by layer, and kinds of tensors by step.

Contract: plain data. A cell stands for the worst of its tensors, in shares of the tensor's own bound, on a scale of
decades. Tables are bounded by a number of cells: then a column is the worst of several, and the note says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.report.comparison.error_path import (
    OUTSIDE,
    Grid,
    PathPoint,
    find_error_path,
    layer_grids,
    list_points,
    step_grid,
)
from mock_scheduler.support.text import count_of
from mock_scheduler.verdict.verdict import Verdict
from mock_scheduler.verdict.wording.tensors import bound_ratio, format_bound, format_relative, format_share

LEAST_COLUMNS = 4

#: Upper ends of the shades within the bound, and then beyond it, in shares of the bound.
SHADES: tuple[tuple[str, float], ...] = (
    ("in1", 1e-3),
    ("in2", 1e-2),
    ("in3", 0.1),
    ("in4", 1.0),
    ("out1", 10.0),
    ("out2", 1e3),
    ("out3", math.inf),
)
EQUAL, NO_NUMBER, NOT_JUDGED = "equal", "none", "unjudged"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatCell:
    """One cell. shade: of ``SHADES``, or ``equal``, ``none`` (no number) or ``unjudged``. ratio: difference / bound;
    ``None`` where there is no number. text: in the cell. words: for a reader who points at it.
    """

    shade: str
    ratio: float | None
    text: str
    words: str
    is_first: bool = False

    @property
    def is_beyond(self) -> bool:
        """The cell is beyond its bound, or has no number."""
        return self.shade.startswith("out") or self.shade == NO_NUMBER


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatTable:
    """A heat map. ``axis``: the meaning of a column; a cell is ``None`` where there is no tensor."""

    title: str
    axis: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[HeatCell | None, ...], ...]
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorMap:
    """Holds the error's way through one update, layer by layer, and through the steps; ``steps``: of one step ``None``.

    is_parting: the runs first part in this update; else it is the one nearest to its bounds.
    """

    step: int
    update: int
    is_parting: bool
    layers: tuple[HeatTable, ...]
    steps: HeatTable | None


def build_error_map(verdict: Verdict, *, max_cells: int) -> ErrorMap | None:
    """The tables of a comparison, of ``max_cells`` cells each at most; ``None`` where all bits are equal."""
    points = list_points(verdict)
    if all(point.tier == "identical" for point in points):
        return None
    path = find_error_path(points, verdict)
    over_steps = step_grid(points)
    return ErrorMap(
        step=path.step,
        update=path.update,
        is_parting=any(point.is_first for point in path.points),
        layers=tuple(_heat_table(grid, "layer", max_cells) for grid in layer_grids(path.all_points)),
        steps=_heat_table(over_steps, "step", max_cells) if len(over_steps.columns) > 1 else None,
    )


def shade_of(difference: TensorDifference | None) -> str:
    """Choose the shade for a tensor's distance from its bound."""
    if difference is None:
        return NO_NUMBER
    if difference.bit_equal or difference.relative == 0:
        return EQUAL
    if not difference.is_judged and not difference.exceeds:
        return NOT_JUDGED
    ratio = bound_ratio(difference)
    return next(shade for shade, end in SHADES if ratio <= end)


def shrink_grid(grid: Grid, max_cells: int) -> tuple[Grid, int]:
    """The grid with as many columns put together, worst first, as ``max_cells`` asks for; and how many are one."""
    most = max(max_cells // max(len(grid.rows), 1), LEAST_COLUMNS)
    # Columns are put together evenly; the worst of several stands for them, so nothing beyond a bound is hidden.
    is_apart = bool(grid.spans) and grid.spans[-1][0] == OUTSIDE  # the parts of no layer stay by themselves
    inner = len(grid.spans) - is_apart
    size = max(-(-inner // max(most - is_apart, 1)), 1)
    if size == 1:
        return grid, 1
    spans = [(start, min(start + size, inner)) for start in range(0, inner, size)]
    spans += [(inner, inner + 1)] if is_apart else []
    return (
        Grid(
            title=grid.title,
            rows=grid.rows,
            spans=tuple((grid.spans[start][0], grid.spans[stop - 1][1]) for start, stop in spans),
            cells=tuple(tuple(_worst(row[start:stop]) for start, stop in spans) for row in grid.cells),
            note=grid.note,
        ),
        size,
    )


def _heat_table(grid: Grid, axis: str, max_cells: int) -> HeatTable:
    shrunk, size = shrink_grid(grid, max_cells)
    notes = [grid.note] if grid.note else []
    notes += [f"{count_of(size, f'column of {axis}s', f'columns of {axis}s')} are drawn as one"] if size > 1 else []
    return HeatTable(
        title=grid.title,
        axis=axis,
        rows=shrunk.rows,
        columns=shrunk.columns,
        cells=tuple(tuple(None if point is None else _heat_cell(point) for point in row) for row in shrunk.cells),
        note="; ".join(notes),
    )


def _heat_cell(point: PathPoint) -> HeatCell:
    difference, shade = point.difference, shade_of(point.difference)
    others = f"; the worst of {point.num_tensors:,} tensors" if point.num_tensors > 1 else ""
    if difference is None:
        return HeatCell(
            shade=shade, ratio=None, text="?", words=f"{point.key.describe()}: {point.message}{others}",
            is_first=point.is_first,
        )  # fmt: skip
    ratio = bound_ratio(difference)
    if shade == EQUAL:
        text, words = "=", "equal to the last bit" if difference.bit_equal else "equal within the rounding of storing"
    else:
        text = "~" if shade == NOT_JUDGED else format_share(ratio)
        words = f"{format_relative(difference)}, bound {format_bound(difference)}"
    if difference.num_excluded:
        words += f"; {count_of(difference.num_excluded, 'element')} of {difference.num_elements:,} without a say"
    return HeatCell(
        shade=shade,
        ratio=ratio,
        text=text,
        words=f"{point.key.describe()}: {words}{others}",
        is_first=point.is_first,
    )


def _worst(points: Sequence[PathPoint | None]) -> PathPoint | None:
    found = [point for point in points if point is not None]
    first = next((point for point in found if point.is_first), None)
    return first or max(found, key=lambda point: point.severity, default=None)
