"""Follows an error through a training step: every tensor's difference in the order of computation, and as grids.

Contract: plain data for plots. Bounded: where an update has more tensors than ``MAX_POINTS``, a point is the worst of
all tensors of one part of a layer, or of one layer; a grid has at most ``MAX_COLUMNS`` columns and ``MAX_ROWS`` rows,
and a cell is the worst of all its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from mock_scheduler.comparison.findings import Finding
from mock_scheduler.comparison.pairing.order import order_keys
from mock_scheduler.comparison.tensors import TensorDifference, Tier
from mock_scheduler.config.instruments import TRACE_KINDS, TraceKind
from mock_scheduler.report.comparison.view import tier_of
from mock_scheduler.support.text import count_of, in_words
from mock_scheduler.trace.entries import PHASES, Phase, TraceKey
from mock_scheduler.verdict.verdict import Verdict
from mock_scheduler.verdict.wording.findings import describe_finding
from mock_scheduler.verdict.wording.tensors import bound_ratio

MAX_POINTS = 1500
MAX_COLUMNS = 200
MAX_ROWS = 40

PointTier = Tier | Literal["undecided", "missing"]

_DECODER = "decoder.layers."
_LAYER = re.compile(r"^(.*\blayers\.)(\d+)(?:\.(.*))?$")
_EXPERT = re.compile(r"\blocal_experts\.\d+\b")
_SUFFIX = re.compile(r"\.(weight|bias)$")
_BY_SEVERITY: tuple[PointTier, ...] = ("identical", "ulp", "tolerance", "undecided", "diverged", "missing")
_WHOLE_LAYER = "output of the layer"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """Where in the model a tensor is. layer: ``None`` outside the layers. part: the same name in every layer."""

    layer: int | None
    part: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PathPoint:
    """Holds one tensor, or the worst of several (``num_tensors``), of one update.

    difference: ``None`` where there is no number; ``message`` then says why. is_first: the first divergence.
    """

    key: TraceKey
    place: TensorPlace
    tier: PointTier
    difference: TensorDifference | None
    message: str
    num_tensors: int = 1
    is_first: bool = False

    @property
    def severity(self) -> tuple[int, float]:
        """Grows with the distance from the bound."""
        return _BY_SEVERITY.index(self.tier), bound_ratio(self.difference)


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorPath:
    """Holds one update's tensors in the order of computation; ``points`` stand for ``all_points``."""

    step: int
    update: int
    points: tuple[PathPoint, ...]
    all_points: tuple[PathPoint, ...]

    @property
    def is_aggregated(self) -> bool:
        """Whether points stand for several tensors."""
        return len(self.all_points) > len(self.points)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Holds the worst points by row and column.

    Args:
        spans: The first and the last label of each column.
        cells: ``None`` where there is no tensor.
        note: How many columns were put together.
    """

    title: str
    rows: tuple[str, ...]
    spans: tuple[tuple[str, str], ...]
    cells: tuple[tuple[PathPoint | None, ...], ...]
    note: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns the columns' labels: ``8``, or ``8 to 11``."""
        return tuple(first if first == last else f"{first} to {last}" for first, last in self.spans)


@lru_cache(maxsize=1 << 16)  # a name comes back at every step
def find_place(name: str) -> TensorPlace:
    """Layer and part of a canonical name: ``decoder.layers.3.mlp.linear_fc1.weight`` is part ``mlp.linear_fc1`` of 3.

    A weight and its bias are one part, and so are all experts. Of another model, as ``critic.``, the prefix stays.
    """
    match = _LAYER.match(name)
    part = name if match is None else match[1].removesuffix(_DECODER) + (match[3] or _WHOLE_LAYER)
    part = _SUFFIX.sub("", _EXPERT.sub("local_experts.*", part))
    return TensorPlace(layer=None if match is None else int(match[2]), part=part)


def list_points(verdict: Verdict) -> list[PathPoint]:
    """Returns a point for every compared or missing tensor, in the order of computation."""
    tensors = verdict.tensors
    if tensors is None:
        return []
    by_key: dict[TraceKey, TensorDifference | Finding] = {item.key: item for item in tensors.differences}
    for finding in (*tensors.findings, *tensors.unusable):
        key = _key_of(finding)
        if key is not None and not finding.is_selection:
            by_key[key] = finding
    first = verdict.first
    first_key = None if first is None else (first.step, first.update, first.kind, first.name)
    return [
        _point(key, by_key[key], is_first=(key.step, key.update, key.kind, key.name) == first_key)
        for key in order_keys(by_key)
    ]


def find_error_path(points: Sequence[PathPoint], verdict: Verdict) -> ErrorPath:
    """The path of the update in which the runs first part; where they do not, of the one nearest to its bounds.

    ``points``: those of ``list_points``; there must be at least one.
    """
    step, update = _choose_update(points, verdict)
    chosen = [point for point in points if (point.key.step, point.key.update) == (step, update)]
    return ErrorPath(step=step, update=update, points=_bounded(chosen), all_points=tuple(chosen))


def layer_grids(points: Sequence[PathPoint]) -> tuple[Grid, ...]:
    """Layer by part for the forward pass, the backward pass, the gradients and the update, of one update's points."""
    grids = []
    for title, phase in _GRIDS:
        own = [point for point in points if PHASES[point.key.kind] is phase]
        if any(point.place.layer is not None for point in own):
            grids.append(_layer_grid(title, own))
    return tuple(grids)


def step_grid(points: Sequence[PathPoint]) -> Grid:
    """Returns the kind by step: the worst of each."""
    steps = sorted({point.key.step for point in points})
    columns, size = _bucket(steps)
    kinds = [kind for kind in TRACE_KINDS if any(point.key.kind == kind for point in points)]
    return _make_grid(
        "over steps",
        points,
        rows=[(kind, in_words(kind)) for kind in kinds],
        columns=_column_spans(columns),
        row_of=lambda point: point.key.kind,
        column_of=lambda point: columns[point.key.step],
        note=f"a column is the worst of {size} steps" if size > 1 else "",
    )


def _bucket(numbers: Sequence[int]) -> tuple[dict[int, int], int]:
    """Returns the column of each number, ``MAX_COLUMNS`` at most, and how many share one."""
    size = max(-(-len(numbers) // MAX_COLUMNS), 1)
    return {number: index // size for index, number in enumerate(numbers)}, size


def _column_spans(columns: dict[int, int]) -> list[tuple[Hashable, tuple[str, str]]]:
    """Returns each column and the first and last number in it."""
    numbers: dict[int, list[int]] = {}
    for number, column in columns.items():
        numbers.setdefault(column, []).append(number)
    return [(column, (str(shared[0]), str(shared[-1]))) for column, shared in numbers.items()]


_GRIDS: tuple[tuple[str, Phase], ...] = (
    ("forward", Phase.FORWARD),
    ("backward (gradients of activations)", Phase.BACKWARD),
    ("gradients of parameters", Phase.GRADIENT),
    ("update", Phase.UPDATE),
)
#: The column of what is in no layer.
OUTSIDE = "outside"


def _layer_grid(title: str, points: Sequence[PathPoint]) -> Grid:
    columns, size = _bucket(sorted({point.place.layer for point in points if point.place.layer is not None}))
    parts = list(dict.fromkeys(point.place.part for point in sorted(points, key=_is_outside)))
    shown, rest = parts[:MAX_ROWS], parts[MAX_ROWS:]
    other = count_of(len(rest), "other part")
    has_outside = any(map(_is_outside, points))
    outside: list[tuple[Hashable, tuple[str, str]]] = [(OUTSIDE, (OUTSIDE, OUTSIDE))] if has_outside else []
    return _make_grid(
        title,
        points,
        rows=[(part, part) for part in shown] + ([(other, other)] if rest else []),
        columns=_column_spans(columns) + outside,
        row_of=lambda point: point.place.part if point.place.part in shown else other,
        column_of=lambda point: OUTSIDE if point.place.layer is None else columns[point.place.layer],
        note=f"a column is the worst of {size} layers" if size > 1 else "",
    )


def _is_outside(point: PathPoint) -> bool:
    """Whether it belongs to no layer; such parts are sorted behind the others."""
    return point.place.layer is None


def _make_grid(
    title: str,
    points: Iterable[PathPoint],
    *,
    rows: Sequence[tuple[Hashable, str]],
    columns: Sequence[tuple[Hashable, tuple[str, str]]],
    row_of: Callable[[PathPoint], Hashable],
    column_of: Callable[[PathPoint], Hashable],
    note: str,
) -> Grid:
    """Returns ``rows`` and ``columns``: the value of each, and its label or span of labels."""
    cells: dict[tuple[Hashable, Hashable], list[PathPoint]] = {}
    for point in points:
        cells.setdefault((row_of(point), column_of(point)), []).append(point)
    return Grid(
        title=title,
        rows=tuple(label for _, label in rows),
        spans=tuple(span for _, span in columns),
        cells=tuple(
            tuple(_worst_of(cells[row, column]) if (row, column) in cells else None for column, _ in columns)
            for row, _ in rows
        ),
        note=note,
    )


def _key_of(finding: Finding) -> TraceKey | None:
    kind = next((kind for kind in TRACE_KINDS if kind == finding.kind), None)
    if kind is None or finding.update is None:
        return None
    return TraceKey(step=finding.step, update=finding.update, kind=kind, name=finding.name)


def _point(key: TraceKey, outcome: TensorDifference | Finding, *, is_first: bool) -> PathPoint:
    place = find_place(key.name)
    if isinstance(outcome, Finding):
        return PathPoint(
            key=key, place=place, tier="missing", difference=None, message=describe_finding(outcome), is_first=is_first
        )
    return PathPoint(key=key, place=place, tier=tier_of(outcome), difference=outcome, message="", is_first=is_first)


def _choose_update(points: Sequence[PathPoint], verdict: Verdict) -> tuple[int, int]:
    first = verdict.first
    when = {(point.key.step, point.key.update) for point in points}
    if first is not None and (first.step, first.update or 0) in when:
        return first.step, first.update or 0
    worst = max(points, key=lambda point: point.severity)
    return worst.key.step, worst.key.update


def _bounded(points: Sequence[PathPoint]) -> tuple[PathPoint, ...]:
    for group_of in (_by_part, _by_layer, lambda point: point.key.kind):
        if len(points) <= MAX_POINTS:
            break
        groups: dict[Hashable, list[PathPoint]] = {}
        for point in points:  # experts' parts alternate, so that those of one part do not lie side by side
            groups.setdefault(group_of(point), []).append(point)
        points = [_worst_of(group) for group in groups.values()]
    return tuple(points)


def _by_part(point: PathPoint) -> tuple[TraceKind, int | None, str]:
    return point.key.kind, point.place.layer, point.place.part


def _by_layer(point: PathPoint) -> tuple[TraceKind, int | None, str]:
    """Tensors outside of the layers stay apart: the embedding is not the output."""
    return point.key.kind, point.place.layer, point.place.part if _is_outside(point) else ""


def _worst_of(points: Sequence[PathPoint]) -> PathPoint:
    """The first divergence if it is among them, else the one furthest from equality, for all their tensors."""
    first = next((point for point in points if point.is_first), None)
    worst = first or max(points, key=lambda point: point.severity)
    return replace(worst, num_tensors=sum(point.num_tensors for point in points))
