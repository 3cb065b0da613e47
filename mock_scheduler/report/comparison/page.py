"""A comparison as one HTML page that opens offline: verdict, first divergence, the error's path, and all beside it.

Contract: bounded, and every cut is said: at most ``MAX_TENSORS`` tensors, ``MAX_LINES`` lines of each list,
``MAX_METRICS`` metrics in the table and ``MAX_PANELS`` of them drawn; figures as in ``error_path``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.comparison.tensors import TensorComparison
from mock_scheduler.comparison.walk.metrics import MetricComparison, MetricLog, load_metrics, load_run_metrics
from mock_scheduler.display.pages import render_page, write_page
from mock_scheduler.errors import ConfigError, TraceError, UnwrittenError
from mock_scheduler.report.comparison.error_path import ErrorPath, find_error_path, layer_grids, list_points, step_grid
from mock_scheduler.report.comparison.figures import grid_figure, metric_figure
from mock_scheduler.report.comparison.page_tables import (
    MetricTable,
    TensorTable,
    TierTable,
    build_metric_table,
    build_tensor_table,
    build_tier_table,
)
from mock_scheduler.report.comparison.path_figure import path_figure
from mock_scheduler.report.comparison.view import describe_equal_metrics, metrics_to_show, name_sides, unmatched
from mock_scheduler.report.origin import describe_origin
from mock_scheduler.run_folder.inputs import ComparedInput
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.text import count_of
from mock_scheduler.trace.remote import open_location
from mock_scheduler.verdict.coverage import find_nearest
from mock_scheduler.verdict.results import ComparisonResult
from mock_scheduler.verdict.wording.bounds import describe_bounds
from mock_scheduler.verdict.wording.coverage import describe_begin, describe_unseen
from mock_scheduler.verdict.wording.findings import describe_finding
from mock_scheduler.verdict.wording.reasons import describe_rest
from mock_scheduler.verdict.wording.tensors import (
    describe_flips,
    describe_ledgers,
    describe_margin,
    describe_not_compared,
)
from mock_scheduler.verdict.wording.verdicts import NOT_LOOKED_AT, TONES, describe_sentence

MAX_LINES = 50
MAX_PANELS = 8

#: Where to find what a page does not show.
MORE = "as many as 1,000 with --json"

_NUM_EQUAL_PANELS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _VerdictPart:
    """Holds the top of the page."""

    tone: str
    word: str
    sentence: str
    rest: str
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _TensorPart:
    """All about tensors. path, layers_note, steps: notes above figures; ``steps`` is ``None`` of one step.

    layers: the element and the caption of each grid; empty where no tensor of the update belongs to a layer.
    """

    tiers: TierTable
    path: str
    layers_note: str
    layers: tuple[tuple[str, str], ...]
    steps: str | None
    table: TensorTable | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _MetricPart(MetricTable):
    """Holds all about metrics. plots: elements of their curves."""

    note: str
    plots: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _ListPart:
    """Holds lines under a title."""

    title: str
    note: str
    lines: tuple[str, ...]


def write_comparison_page(result: ComparisonResult, path: Path) -> None:
    """Write the page to ``path``, whole or not at all; folders are made.

    Metric curves are read again from the compared runs. Raises ``AlignmentError`` where it cannot be written.
    """
    write_page(render_comparison_page(result), path, UnwrittenError)


def render_comparison_page(result: ComparisonResult) -> str:
    """Render the page; nearly all of its 5 MB are plotly's script."""
    figures: list[JSON] = []
    verdict = result.verdict
    baseline, candidate = name_sides(result)
    heading = f"{candidate} against {baseline}"
    return render_page(
        "mock_scheduler.report",
        "comparison.html",
        title=f"{verdict.kind.value}: {heading}",
        heading=heading,
        origin=describe_origin(),
        footer=describe_bounds(result.bounds),
        verdict=_verdict_part(result),
        tensors=None if verdict.tensors is None else _tensor_part(result, verdict.tensors, figures),
        metrics=None if verdict.metrics is None else _metric_part(result, verdict.metrics, figures),
        lists=_list_parts(result),
        max_lines=MAX_LINES,
        more=MORE,
        figures=figures,
    )


def _verdict_part(result: ComparisonResult) -> _VerdictPart:
    verdict = result.verdict
    tensors = verdict.tensors
    sides = zip(name_sides(result), (result.baseline, result.candidate), strict=True)
    rows = [(name, _describe_side(side)) for name, side in sides]
    if tensors is not None:
        level = "sketch: relative differences are estimated" if tensors.level == "sketch" else "full"
        steps = count_of(len(tensors.steps), "step")
        rows.append(("compared", f"{count_of(len(tensors.differences), 'tensor')} over {steps}, level {level}"))
        worst = find_nearest(tensors)
        if worst is not None:
            rows.append(("worst", f"{worst.key.describe()}, {describe_margin(worst)}"))
    rows += [(NOT_LOOKED_AT, text) for text in [describe_unseen(verdict.unseen)] if text]
    if verdict.full_dump:
        rows.append(("next", f"run both again with {' '.join(verdict.full_dump)}"))
    sentence, rest = describe_sentence(verdict), describe_rest(verdict)
    return _VerdictPart(
        tone=TONES[verdict.kind],
        word=verdict.kind.value,
        sentence=": ".join(filter(None, (describe_begin(verdict.unseen), sentence or rest))),
        rest=rest if sentence else "",
        rows=tuple(rows),
    )


def _describe_side(side: ComparedInput) -> str:
    layout = f"{side.run.layout}, " if side.run is not None and side.run.layout else ""
    return f"{layout}{side.kind} in {side.location}"


def _tensor_part(result: ComparisonResult, tensors: TensorComparison, figures: list[JSON]) -> _TensorPart:
    points = list_points(result.verdict)
    path = find_error_path(points, result.verdict) if points else None
    layers, steps = [], None
    if path is not None:
        figures.append(path_figure(path, "path"))
        for number, grid in enumerate(layer_grids(path.all_points)):
            figures.append(grid_figure(grid, f"layers{number}", x_title="layer"))
            layers.append((f"layers{number}", f"{grid.title} ({grid.note})" if grid.note else grid.title))
    if path is not None and len(tensors.steps) > 1:
        grid = step_grid(points)
        figures.append(grid_figure(grid, "steps", x_title="step"))
        steps = f"The worst tensor of each kind. {grid.note}".strip()
    return _TensorPart(
        tiers=build_tier_table(tensors),
        path="" if path is None else _describe_path(path, is_sketch=tensors.level == "sketch"),
        layers_note=""
        if path is None
        else f"The worst tensor of each part, at step {path.step}, update {path.update}. Colours: how far from its "
        "bound.",
        layers=tuple(layers),
        steps=steps,
        table=build_tensor_table(tensors),
    )


def _describe_path(path: ErrorPath, *, is_sketch: bool) -> str:
    which = "where all are identical"
    if any(point.is_first for point in path.points):
        which = "in which the runs first part"
    elif any(point.tier != "identical" for point in path.points):
        which = "which is nearest to its bounds"
    note = f"Every tensor of step {path.step}, update {path.update}, {which}, in the order in which it is computed."
    if path.is_aggregated:
        counts = f"{len(path.all_points):,} tensors are {len(path.points):,} marks"
        note += f" A mark is the worst of one part of a layer or more, so that {counts}."
    return f"{note} Estimated from sketches, with error bars." if is_sketch else note


def _metric_part(result: ComparisonResult, metrics: MetricComparison, figures: list[JSON]) -> _MetricPart | None:
    """``None`` where no metric was compared."""
    if not metrics.differences:
        return None
    differing = metrics_to_show(metrics)
    equal = [item for item in metrics.differences if item.bit_equal]
    drawn = list(differing[:MAX_PANELS] or equal[:_NUM_EQUAL_PANELS])
    note = f"{describe_equal_metrics(metrics) or 'No metric is equal at every step'}."
    logs = _load_logs(result)
    if logs is None:
        drawn = []
        note += " Their curves are not drawn, since the logs cannot be read any more."
    else:
        figures += [
            metric_figure(
                item.name,
                logs,
                name_sides(result),
                f"metric{number}",
                floor=result.bounds.metric(item.nearest_step, item.name).floor,
            )
            for number, item in enumerate(drawn)
        ]
    if drawn and len(drawn) < len(differing):
        note += f" Drawn are {len(drawn)} of {len(differing)} that differ."
    table = build_metric_table(differing)
    plots = tuple(f"metric{number}" for number in range(len(drawn)))
    return _MetricPart(note=note, plots=plots, rows=table.rows, num_more=table.num_more)


def _load_logs(result: ComparisonResult) -> tuple[MetricLog, MetricLog] | None:
    """Both runs' metrics by step; ``None`` where they are no longer there."""
    try:
        return _load_log(result.baseline), _load_log(result.candidate)
    except (ConfigError, TraceError):
        return None


def _load_log(side: ComparedInput) -> MetricLog:
    with open_location(side.location, has_trace=False) as path:
        return load_metrics(path) if side.kind == "metrics" else load_run_metrics(path)


def _list_parts(result: ComparisonResult) -> list[_ListPart]:
    """Lists of lines: findings without a number, replicas, choices of experts, calls, and omissions."""
    verdict, tensors = result.verdict, result.verdict.tensors
    found = [describe_finding(item) for item in unmatched(verdict.metrics, tensors)]
    lists = [("Without a number", "Missing on one side, or nothing that can be subtracted.", found)]
    if tensors is not None:
        conflicts = [f"in the candidate: {item.describe()}" for item in tensors.candidate_conflicts]
        conflicts += [f"in the baseline: {item.describe()}" for item in tensors.baseline_conflicts]
        agree = "" if conflicts else "Every element that several ranks hold is equal on all of them, in both runs."
        lists.append(("Replicas", agree or "Ranks that must hold the same bits and do not.", conflicts))
        flips = [describe_flips(item) for item in tensors.flips if item.num_flipped]
        lists.append(("Choice of experts", "Tokens that were left out behind a choice that is rounding.", flips))
        lists.append(("Calls", "Random draws and collectives, rank by rank.", describe_ledgers(tensors.ledgers)))
        lists.append(("Not compared", "No fault, and nothing that this page proves.", describe_not_compared(tensors)))
    recordings = result.recordings
    if recordings is not None:
        fields = [field.describe() for field in recordings.contract]
        lists.append(("Contract", "Fields that differ between A, the baseline, and B, the candidate.", fields))
        steps = [f"{step.folder} step {step.step}: {step.summarise()}" for step in recordings.steps]
        lists.append(("Recorded steps that differ", "", steps))
    return [
        _ListPart(title=title, note=note, lines=tuple(lines))
        for title, note, lines in lists
        if lines or title == "Replicas"
    ]
