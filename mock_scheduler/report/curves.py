"""Draws curves of logged metrics over steps, a panel for each metric, as one HTML page without requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from mock_scheduler.comparison.walk.metrics import MetricLog, load_run_metrics
from mock_scheduler.display.pages import axis_title, finite_or_none, plain_layout, render_page, soft_font, write_page
from mock_scheduler.display.terminal import shortest_names
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.text import count_of, list_some

# Apart for colour-blind eyes (Okabe and Ito, 2008), on light and on dark pages.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "theme:ink")

_NUM_LISTED = 40
_MAX_MARKED = 20

#: The metrics that are drawn where none are asked for, as far as they were logged.
_DEFAULT_METRICS = ("success", "val/success", "entropy", "grad_norm")


def plot_runs(run_dirs: Sequence[Path], metrics: Sequence[str] | None, output: Path) -> None:
    """Write a page with one panel per metric and a curve per run in it.

    Args:
        run_dirs: Output folders of runs.
        metrics: Names as in ``metrics.jsonl``; ``None`` or none of them: those of ``_DEFAULT_METRICS``.
        output: The page; its folder is made.

    Raises:
        TraceError: For a folder without readable metrics.
        ConfigError: For a metric in no log, or where the page cannot be written.
    """
    names = shortest_names([run_dir.resolve() for run_dir in run_dirs])
    logs = {name: load_run_metrics(run_dir) for name, run_dir in zip(names, run_dirs, strict=True)}
    if not metrics:
        logged = {name for log in logs.values() for values in log.values() for name in values}
        metrics = [name for name in _DEFAULT_METRICS if name in logged] or sorted(logged)[:4]
    _check_names(metrics, logs)
    figures = [_panel(metric, logs, f"metric{number}") for number, metric in enumerate(metrics)]
    page = render_page(
        "mock_scheduler.report",
        "curves.html",
        title=f"Metrics of {list_some(names, 3, ', ')}",
        heading=f"Metrics of {count_of(len(logs), 'run')}",
        footer="; ".join(map(str, run_dirs)),
        plots=[f"metric{number}" for number in range(len(figures))],
        figures=figures,
    )
    write_page(page, output, ConfigError)


def _panel(metric: str, logs: Mapping[str, MetricLog], element: str) -> JSON:
    """Returns one metric of all runs."""
    curves: list[JSON] = [
        _curve(run, log, metric, colour=_COLOURS[number % len(_COLOURS)])
        for number, (run, log) in enumerate(logs.items())
    ]
    axis: dict[str, JSON] = {"gridcolor": "theme:line", "zeroline": False, "tickfont": soft_font(11)}
    layout: dict[str, JSON] = {
        **plain_layout(height=330),
        "margin": {"l": 62, "r": 12, "t": 62, "b": 44},
        "title": {"text": metric, "font": {"size": 14, "color": "theme:ink"}, "x": 0.01, "y": 0.97},
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": soft_font(11)},
        "xaxis": {**axis, "title": axis_title("step")},
        "yaxis": axis,
    }
    return {"id": element, "data": curves, "layout": layout}


def _curve(run: str, log: MetricLog, metric: str, *, colour: str) -> JSON:
    points = [(step, values[metric]) for step, values in sorted(log.items()) if metric in values]
    return {
        "type": "scatter",
        "name": run,
        "mode": "lines+markers" if len(points) < _MAX_MARKED else "lines",
        "x": [step for step, _ in points],
        "y": [finite_or_none(value) for _, value in points],
        "line": {"color": colour, "width": 2},
    }


def _check_names(metrics: Sequence[str], logs: Mapping[str, MetricLog]) -> None:
    known = sorted({name for log in logs.values() for values in log.values() for name in values})
    problems = []
    for name in metrics:
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            problems.append(f"no run logged the metric {name!r}" + (f"; nearest: {nearest[0]}" if nearest else ""))
    if problems:
        raise ConfigError("\n".join([*problems, f"logged: {list_some(known, _NUM_LISTED, ', ')}"]))
