"""Curves of logged metrics over steps, as one HTML page that opens offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mock_scheduler.compare.walk.metrics import MetricLog, load_metrics
from mock_scheduler.display.text import shortest_names
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.run_files import METRICS_FILE
from mock_scheduler.support.text import list_some

# Readable on white and on paper, and apart for colour-blind eyes (Okabe and Ito, 2008).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


_NUM_LISTED = 40

#: What is shown where nothing is asked for, as far as it was logged.
_DEFAULT_METRICS = ("success", "val/success", "entropy", "grad_norm")


_LEGEND_PX = 45  # below plotly's own buttons


def plot_runs(run_dirs: Sequence[Path], metrics: Sequence[str] | None, output: Path) -> None:
    """Write one panel per metric with a curve per run; ``metrics`` are names as in ``metrics.jsonl``.

    Raises ``TraceError`` for a folder without readable metrics, ``ConfigError`` for a metric that no run logged.
    """
    names = shortest_names([run_dir.resolve() for run_dir in run_dirs])
    logs = {name: load_metrics(run_dir / METRICS_FILE) for name, run_dir in zip(names, run_dirs, strict=True)}
    if not metrics:
        logged = {name for log in logs.values() for values in log.values() for name in values}
        metrics = [name for name in _DEFAULT_METRICS if name in logged] or sorted(logged)[:4]
    _check_names(metrics, logs)
    columns = min(2, len(metrics))
    rows = -(-len(metrics) // columns)
    figure = make_subplots(rows=rows, cols=columns, subplot_titles=list(metrics), vertical_spacing=0.32 / rows)
    for run_index, (run, log) in enumerate(logs.items()):
        for index, metric in enumerate(metrics):
            figure.add_trace(
                _curve(run, log, metric, colour=_COLOURS[run_index % len(_COLOURS)], in_legend=index == 0),
                row=index // columns + 1,
                col=index % columns + 1,
            )
    figure.update_xaxes(title_text="step")
    height = 340 * rows + 40
    figure.update_layout(
        template="plotly_white",
        height=height,
        width=960,
        # From the top of the page, so that it stays above the titles however many panels there are.
        legend={"orientation": "h", "yref": "container", "y": 1 - _LEGEND_PX / height, "yanchor": "top"},
        margin={"t": 110, "r": 20},
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(output, include_plotlyjs=True, full_html=True)


def _curve(run: str, log: MetricLog, metric: str, *, colour: str, in_legend: bool) -> go.Scatter:
    points = [(step, values[metric]) for step, values in sorted(log.items()) if metric in values]
    return go.Scatter(
        x=[step for step, _ in points],
        y=[value for _, value in points],
        name=run,
        legendgroup=run,
        showlegend=in_legend,
        mode="lines+markers" if len(points) < 20 else "lines",
        line={"color": colour, "width": 2},
    )


def _check_names(metrics: Sequence[str], logs: Mapping[str, MetricLog]) -> None:
    known = sorted({name for log in logs.values() for values in log.values() for name in values})
    problems = []
    for name in metrics:
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            problems.append(f"no run logged the metric {name!r}" + (f"; nearest: {nearest[0]}" if nearest else ""))
    if problems:
        raise ConfigError("\n".join([*problems, f"logged: {list_some(known, _NUM_LISTED, ', ')}"]))
