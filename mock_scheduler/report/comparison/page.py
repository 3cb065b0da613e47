"""A comparison as one HTML page that opens offline: verdict, first divergence, the error's path, and all beside it.

Contract: self-contained (plotly's script is in it, nothing is loaded), light or dark as the reader's system is, and
printable. Bounded, and every cut is said: at most ``MAX_TENSORS`` tensors, ``MAX_LINES`` lines of each list,
``MAX_METRICS`` metrics in the table and ``MAX_PANELS`` of them drawn; figures as in ``error_path``. Texts of a run are
escaped, whatever they hold.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from mock_scheduler.compare.tensors import TensorComparison
from mock_scheduler.compare.walk.metrics import MetricComparison, MetricDifference, MetricLog, load_metrics
from mock_scheduler.display.page_document import render_document, write_document
from mock_scheduler.errors import AlignmentError, TraceError
from mock_scheduler.report.comparison.error_path import ErrorPath, find_error_path, layer_grids, list_points, step_grid
from mock_scheduler.report.comparison.grid_figure import grid_figure
from mock_scheduler.report.comparison.metric_figure import metric_figure
from mock_scheduler.report.comparison.page_parts import (
    bullets,
    facts,
    metrics_html,
    more_line,
    tensors_html,
    tiers_html,
)
from mock_scheduler.report.comparison.path_figure import path_figure
from mock_scheduler.report.comparison.view import (
    count_tiers,
    describe_equal_metrics,
    describe_flips,
    describe_ledgers,
    describe_margin,
    describe_not_compared,
    describe_rest,
    metrics_to_show,
    name_sides,
    unmatched,
    worst_judged,
)
from mock_scheduler.run_folder.inputs import ComparedInput
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.run_files import METRICS_FILE
from mock_scheduler.support.text import count_of
from mock_scheduler.verdict.results import ComparisonResult
from mock_scheduler.verdict.verdict import VerdictKind
from mock_scheduler.verdict.wording.bounds import describe_bounds
from mock_scheduler.verdict.wording.findings import describe_finding

MAX_PANELS = 8
_NUM_EQUAL_PANELS = 2
_TONES = {
    VerdictKind.IDENTICAL: "good",
    VerdictKind.EMULATED: "good",
    VerdictKind.ROUNDING: "good",
    VerdictKind.DIVERGED: "bad",
}


def write_comparison_page(result: ComparisonResult, path: Path) -> None:
    """Write the page to ``path``, whole or not at all; folders are made.

    Metric curves are read again from the compared runs. Raises ``AlignmentError`` where it cannot be written.
    """
    write_document(render_comparison_page(result), path, AlignmentError)


def render_comparison_page(result: ComparisonResult) -> str:
    """The page's text, of 5 MB, nearly all of which is plotly's script."""
    figures: list[JSON] = []
    sections = [_verdict_section(result)]
    tensors = result.alignment.tensors
    if tensors is not None:
        sections += _tensor_sections(result, tensors, figures)
    if result.alignment.metrics is not None:
        sections.append(_metrics_section(result, result.alignment.metrics, figures))
    sections += _list_sections(result)
    baseline, candidate = name_sides(result)
    title = f"{result.alignment.verdict.value}: {candidate} against {baseline}"
    return render_document(
        title, f"{candidate} against {baseline}", sections, footer=describe_bounds(result.bounds), figures=figures
    )


def _verdict_section(result: ComparisonResult) -> str:
    alignment = result.alignment
    tensors = alignment.tensors
    sides = zip(name_sides(result), (result.baseline, result.candidate), strict=True)
    rows = [(name, _describe_side(side)) for name, side in sides]
    if tensors is not None:
        level = "sketch: relative differences are estimated" if tensors.level == "sketch" else "full"
        steps = count_of(len(tensors.steps), "step")
        rows.append(("compared", f"{count_of(len(tensors.differences), 'tensor')} over {steps}, level {level}"))
        worst = worst_judged(tensors)
        if worst is not None:
            rows.append(("worst", f"{worst.key.describe()}, {describe_margin(worst)}"))
    if alignment.full_dump:
        rows.append(("next", f"run both again with {' '.join(alignment.full_dump)}"))
    sentence = alignment.sentence or alignment.reason
    rest = describe_rest(alignment) if alignment.sentence else ""
    reason = f'<p class="note">{escape(rest)}</p>' if rest else ""
    return (
        f'<section class="verdict {_TONES.get(alignment.verdict, "warn")}">'
        f'<div class="word">{escape(alignment.verdict.value)}</div>'
        f'<p class="sentence">{escape(sentence)}</p>{reason}{facts(rows)}</section>'
    )


def _describe_side(side: ComparedInput) -> str:
    layout = f"{side.run.layout}, " if side.run is not None and side.run.layout else ""
    return f"{layout}{side.kind} in {side.path}"


def _tensor_sections(result: ComparisonResult, tensors: TensorComparison, figures: list[JSON]) -> list[str]:
    sections = [tiers_html(count_tiers(tensors))]
    points = list_points(result.alignment)
    if points:
        path = find_error_path(points, result.alignment)
        sections.append(_path_section(path, figures, is_sketch=tensors.level == "sketch"))
        sections.append(_layers_section(path, figures))
        if len(tensors.steps) > 1:
            grid = step_grid(points)
            figures.append(grid_figure(grid, "steps", x_title="step"))
            note = f"The worst tensor of each kind. {grid.note}".strip()
            sections.append(_section("Over steps", note, _plot("steps")))
    return [*sections, tensors_html(tensors)]


def _path_section(path: ErrorPath, figures: list[JSON], *, is_sketch: bool) -> str:
    which = "where all are identical"
    if any(point.is_first for point in path.points):
        which = "in which the runs first part"
    elif any(point.tier != "identical" for point in path.points):
        which = "which is nearest to its bounds"
    note = f"Every tensor of step {path.step}, update {path.update}, {which}, in the order in which it is computed."
    if path.is_aggregated:
        counts = f"{len(path.all_points):,} tensors are {len(path.points):,} marks"
        note += f" A mark is the worst of one part of a layer or more, so that {counts}."
    if is_sketch:
        note += " Estimated from sketches, with error bars."
    figures.append(path_figure(path, "path"))
    return _section("The error's path", note, _plot("path"))


def _layers_section(path: ErrorPath, figures: list[JSON]) -> str:
    """Empty where no tensor of the update belongs to a layer."""
    plots = []
    for number, grid in enumerate(layer_grids(path.all_points)):
        figures.append(grid_figure(grid, f"layers{number}", x_title="layer"))
        caption = f"{grid.title} ({grid.note})" if grid.note else grid.title
        plots.append(f"<div><h3>{escape(caption)}</h3>{_plot(f'layers{number}')}</div>")
    if not plots:
        return ""
    note = f"The worst tensor of each part, at step {path.step}, update {path.update}. Colours: how far from its bound."
    return _section("Where in the model", note, f'<div class="two">{"".join(plots)}</div>')


def _metrics_section(result: ComparisonResult, metrics: MetricComparison, figures: list[JSON]) -> str:
    """Empty where no metric was compared."""
    if not metrics.differences:
        return ""
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
            metric_figure(item.name, logs, name_sides(result), f"metric{number}", floor=_floor(result, item))
            for number, item in enumerate(drawn)
        ]
    if drawn and len(drawn) < len(differing):
        note += f" Drawn are {len(drawn)} of {len(differing)} that differ."
    plots = "".join(_plot(f"metric{number}") for number in range(len(drawn)))
    body = f'<div class="two">{plots}</div>{metrics_html(differing)}'
    return _section("Metrics", note, body, is_long=True)


def _floor(result: ComparisonResult, metric: MetricDifference) -> float:
    """What a relative difference is relative to at least."""
    return result.bounds.metric(metric.nearest_step, metric.name).floor


def _plot(element: str) -> str:
    return f'<div class="plot" id="{element}"></div>'


def _load_logs(result: ComparisonResult) -> tuple[MetricLog, MetricLog] | None:
    """Both runs' metrics by step; ``None`` where they are no longer there."""
    try:
        baseline, candidate = (
            load_metrics(side.path if side.kind == "metrics" else side.path / METRICS_FILE)
            for side in (result.baseline, result.candidate)
        )
    except TraceError:
        return None
    return baseline, candidate


def _list_sections(result: ComparisonResult) -> list[str]:
    """What is a list of lines: what has no number, replicas, choices of experts, calls, what was left out."""
    alignment, tensors = result.alignment, result.alignment.tensors
    found = [describe_finding(item) for item in unmatched(alignment.metrics, tensors)]
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
        _section(title, note, bullets(lines) + more_line(len(lines)))
        for title, note, lines in lists
        if lines or title == "Replicas"
    ]


def _section(title: str, note: str, body: str, *, is_long: bool = False) -> str:
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section{' class=long' if is_long else ''}><h2>{escape(title)}</h2>{note}{body}</section>"
