"""Lays out the tables of a comparison's page: how far apart by kind, the tensors to look at, metrics that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mock_scheduler.comparison.tensors import TensorComparison, TensorDifference
from mock_scheduler.comparison.thresholds import NUM_ULPS
from mock_scheduler.comparison.walk.metrics import MetricDifference
from mock_scheduler.report.comparison.view import TierCounts, count_tiers, tensor_anchor, tensors_to_show
from mock_scheduler.support.text import in_words
from mock_scheduler.verdict.wording.tensors import (
    describe_details,
    format_bound,
    format_bound_share,
    format_relative,
    format_size,
    format_slope,
)

MAX_TENSORS = 50
MAX_METRICS = 100

_NUM_NEAREST = 10
_NUM_OPEN = 5  # rows whose worst element is shown without a click
_NONE = "–"


@dataclass(frozen=True, kw_only=True, slots=True)
class TierColumn:
    """How many tensors of each kind are how far apart; ``tone``: the class of their colour."""

    title: str
    tone: str
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TierTable:
    """Holds columns with a number, and for each kind its name and its bar: tone, count and width in percent."""

    columns: tuple[TierColumn, ...]
    rows: tuple[tuple[str, tuple[tuple[str, int, str], ...]], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRow:
    """One tensor. anchor: its address in the page. tier: empty beyond its bound. words: labels and texts beneath its
    name; hidden: those of a click.
    """

    anchor: str
    place: str
    kind: str
    tier: str
    name: str
    words: tuple[tuple[str, str], ...]
    hidden: tuple[tuple[str, str], ...]
    numbers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorTable:
    """Holds tensors beyond their bound as computed, or else the nearest to it. columns: titles and classes."""

    heading: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[TensorRow, ...]
    num_more: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricRow:
    """Holds one differing metric, in words and numbers."""

    name: str
    max_abs: str
    max_relative: str
    exceeds: bool
    step: str
    share: str
    first_different: str
    first_exceeding: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricTable:
    """The first differing metrics, and how many more there are."""

    rows: tuple[MetricRow, ...]
    num_more: int


def build_tier_table(tensors: TensorComparison) -> TierTable:
    """How many tensors of each kind are how far apart."""
    counts = count_tiers(tensors)
    columns = [
        ("identical", "identical", [item.identical for item in counts]),
        (f"within {NUM_ULPS} ULP", "ulp", [item.ulp for item in counts]),
        ("within bound", "tolerance", [item.tolerance for item in counts]),
        ("undecided", "undecided", [item.undecided for item in counts]),
        ("diverged", "diverged", [item.diverged for item in counts]),
        ("missing", "missing", [item.missing for item in counts]),
        ("unobserved", "unobserved", [item.unobserved for item in counts]),
        ("of these not judged", "dim", [item.unjudged for item in counts]),
    ]
    return TierTable(
        columns=tuple(
            TierColumn(title=title, tone=tone, counts=tuple(values)) for title, tone, values in columns if any(values)
        ),
        rows=tuple((in_words(item.kind), _bar(item)) for item in counts),
    )


def _bar(item: TierCounts) -> tuple[tuple[str, int, str], ...]:
    parts = (
        ("identical", item.identical),
        ("ulp", item.ulp),
        ("tolerance", item.tolerance),
        ("undecided", item.undecided),
        ("diverged", item.diverged),
        ("missing", item.missing),
    )
    total = sum(count for _, count in parts) or 1
    return tuple((tone, count, f"{100 * count / total:.2f}") for tone, count in parts if count)


def build_tensor_table(tensors: TensorComparison) -> TensorTable | None:
    """The tensors to look at; ``None`` where all are identical."""
    heading, chosen = tensors_to_show(tensors)
    if not chosen:
        return None
    is_nearest = not tensors.exceeding and not tensors.undecided
    limit = _NUM_NEAREST if is_nearest else MAX_TENSORS
    is_sketch = tensors.level == "sketch"
    numbers = ["relative (estimated)" if is_sketch else "relative", "bound"]
    numbers += [] if is_sketch else ["max |a-b|", "ULP", "slope", "cosine"]
    return TensorTable(
        heading=heading,
        columns=(("step, update", ""), ("kind", ""), ("tensor", ""), *((title, "n") for title in numbers)),
        rows=tuple(
            _tensor_row(item, is_sketch=is_sketch, is_open=number < _NUM_OPEN)
            for number, item in enumerate(chosen[:limit])
        ),
        num_more=0 if is_nearest else max(len(chosen) - limit, 0),
    )


def _tensor_row(difference: TensorDifference, *, is_sketch: bool, is_open: bool) -> TensorRow:
    key, details = difference.key, describe_details(difference)
    is_within = not difference.exceeds and not difference.is_undecided
    numbers = [format_relative(difference), format_bound(difference)]
    return TensorRow(
        anchor=tensor_anchor(key.step, key.update, key.kind, key.name),
        place=f"{key.step}, {key.update}",
        kind=in_words(key.kind),
        tier=difference.tier if is_within else "",
        name=key.name,
        words=tuple(row for row in details if is_open or row[0] != "worst"),
        hidden=tuple(row for row in details if not is_open and row[0] == "worst"),
        numbers=(*numbers, *(() if is_sketch else _figures(difference))),
    )


def _figures(difference: TensorDifference) -> tuple[str, ...]:
    figures = difference.figures
    if figures is None:
        return (format_size(difference.max_abs), _NONE, _NONE, _NONE)
    ulp = _NONE if figures.max_ulp is None else f"{figures.max_ulp:,}"
    return (format_size(figures.max_abs), ulp, format_slope(figures.slope), f"{figures.cosine:.7f}")


def build_metric_table(differences: Sequence[MetricDifference]) -> MetricTable:
    """Lay out differing metrics, with their largest differences."""
    return MetricTable(
        rows=tuple(map(_metric_row, differences[:MAX_METRICS])), num_more=max(len(differences) - MAX_METRICS, 0)
    )


def _metric_row(metric: MetricDifference) -> MetricRow:
    first = metric.first_exceeding_step
    return MetricRow(
        name=metric.name,
        max_abs=format_size(metric.max_abs),
        max_relative=format_size(metric.max_relative),
        exceeds=first is not None,
        step=str(metric.max_relative_step),
        share=format_bound_share(metric),
        first_different=str(metric.first_different_step),
        first_exceeding=_NONE if first is None else str(first),
    )
