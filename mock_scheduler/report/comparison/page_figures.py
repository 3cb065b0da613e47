"""What the figures of a comparison's page share: their look, and a tensor in words for whoever points at it.

Contract: a figure is plotly's JSON with the ``id`` of its element. A colour is the name of one of the page's, as
``theme:ink``; texts that come from a run are escaped, since plotly reads some HTML; no value is NaN or infinite.
"""

from __future__ import annotations

from html import escape

from mock_scheduler.report.comparison.error_path import PathPoint
from mock_scheduler.report.comparison.view import describe_details, format_bound, format_relative
from mock_scheduler.support.digests import JSON

FONT: dict[str, JSON] = {"family": "system-ui, sans-serif", "size": 12, "color": "theme:ink"}


def plain_layout(*, height: int) -> dict[str, JSON]:
    """What every figure has: its height in pixels, no background of its own, and the page's font."""
    return {
        "height": height,
        "font": FONT,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"align": "left", "bgcolor": "theme:card", "bordercolor": "theme:line", "font": FONT},
        "hovermode": "closest",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "theme:soft", "activecolor": "theme:ink"},
    }


def describe_point(point: PathPoint) -> str:
    """Everything that is known of a tensor, in lines."""
    lines = [f"<b>{escape(point.key.name)}</b>", escape(point.key.describe())]
    if point.num_tensors > 1:
        lines.append(f"the worst of {point.num_tensors:,} tensors")
    difference = point.difference
    if difference is None:
        return "<br>".join([*lines, *_folded(point.message)])
    estimated = " (estimated)" if difference.low is not None else ""
    lines.append(f"{point.tier}: relative{estimated} {format_relative(difference)}, bound {format_bound(difference)}")
    figures = difference.figures
    if figures is not None:
        ulp = "" if figures.max_ulp is None else f", {figures.max_ulp:,} ULP"
        lines.append(f"max |a-b| {figures.max_abs:.3e}{ulp}; slope {figures.slope:.8g}, cosine {figures.cosine:.8f}")
        lines.append(f"{figures.num_different:,} of {figures.num_elements:,} elements differ")
    for label, text in describe_details(difference):
        lines += _folded(f"{label}: {text}")
    return "<br>".join(lines)


def end_of_name(text: str, width: int) -> str:
    """The end of a name, which tells it from others, where it is longer than ``width``."""
    return text if len(text) <= width else f"…{text[-width + 1 :]}"


def _folded(text: str, width: int = 96) -> list[str]:
    return [escape(text[start : start + width]) for start in range(0, len(text), width)]
