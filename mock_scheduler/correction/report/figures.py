"""The figures of the page of rollout correction, as plotly's JSON; colours are names of the page's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mock_scheduler.correction.report.view import StepHealth
from mock_scheduler.display.pages import axis_title, finite_or_none, plain_layout, soft_font, thin_out
from mock_scheduler.recording.inspection.histogram import Bar
from mock_scheduler.support.digests import JSON

_MAX_MARKED = 20


def histogram_figure(bars: Sequence[Bar], element: str, *, x_title: str, y_title: str) -> JSON:
    """Counts on a log axis, with a line where the two policies agree."""
    shown = [bar for bar in bars if bar.count]
    most = max((bar.count for bar in bars), default=1)
    width = (bars[0].high - bars[0].low) or 1.0 if bars else 1.0
    data: JSON = [
        {
            "type": "bar",
            "x": [(bar.low + bar.high) / 2 for bar in shown],
            "y": [bar.count for bar in shown],
            "width": 0.94 * width,
            "hovertext": [f"{bar.low:g} to {bar.high:g}: {bar.count:,}" for bar in shown],
            "hoverinfo": "text",
            "marker": {"color": "theme:tolerance"},
        }
    ]
    # From a half on, so that a count of 1 has a bar.
    log_axis: dict[str, JSON] = {"type": "log", "range": [math.log10(0.5), math.log10(most) + 0.15], "dtick": 1}
    layout: dict[str, JSON] = {
        **plain_layout(height=260),
        "margin": {"l": 58, "r": 10, "t": 12, "b": 44},
        "showlegend": False,
        "xaxis": {**_axis(x_title), "showgrid": False},
        "yaxis": {**_axis(y_title), **log_axis},
        "shapes": [_line_at_zero()],
    }
    return {"id": element, "data": data, "layout": layout}


def steps_figure(steps: Sequence[StepHealth], element: str) -> JSON:
    """k3 and the effective sample size over steps, each on its own axis."""
    measured = thin_out([step for step in steps if step.k3_kl is not None])
    numbers: list[JSON] = [step.step for step in measured]
    mode = "lines+markers" if len(measured) <= _MAX_MARKED else "lines"
    curves = (
        ("KL (k3)", [step.k3_kl for step in measured], "y", "theme:candidate", "solid"),
        ("effective sample size", [step.effective_sample_size for step in measured], "y2", "theme:tolerance", "dot"),
    )
    data: JSON = [
        {
            "type": "scatter",
            "mode": mode,
            "name": name,
            "x": numbers,
            "y": [finite_or_none(value) for value in values],
            "yaxis": axis,
            "line": {"color": colour, "width": 2, "dash": dash},
            "marker": {"size": 6},
        }
        for name, values, axis, colour, dash in curves
    ]
    ticks: dict[str, JSON] = {"tickvals": numbers} if len(measured) <= _MAX_MARKED else {"nticks": 10}
    layout: dict[str, JSON] = {
        **plain_layout(height=240),
        "margin": {"l": 64, "r": 64, "t": 28, "b": 40},
        "legend": {"orientation": "h", "x": 0, "y": 1.18, "font": soft_font(11)},
        "xaxis": {**_axis("step"), **ticks, "showgrid": False},
        "yaxis": {**_axis("KL (k3)"), "rangemode": "tozero"},
        "yaxis2": {**_axis("effective sample size"), "overlaying": "y", "side": "right", "showgrid": False},
    }
    return {"id": element, "data": data, "layout": layout}


def _axis(title: str) -> dict[str, JSON]:
    return {
        "title": axis_title(title),
        "gridcolor": "theme:line",
        "zeroline": False,
        "tickfont": soft_font(11),
    }


def _line_at_zero() -> JSON:
    line: JSON = {"color": "theme:candidate", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": 0, "x1": 0, "y0": 0, "y1": 1, "yref": "paper", "line": line}
