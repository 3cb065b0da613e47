"""The look that figures of all pages share.

Contract: a figure is plotly's JSON with the ``id`` of its element. A colour is the name of one of the page's palette,
as ``theme:ink``. Texts are plain; of several lines, the first is bold. No value is NaN or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from mock_scheduler.support.digests import JSON

_Item = TypeVar("_Item")

#: Of more steps than this, some are left out, evenly.
MAX_STEPS = 2000

_FONT: JSON = {"family": "system-ui, sans-serif", "size": 12, "color": "theme:ink"}


def plain_layout(*, height: int) -> dict[str, JSON]:
    """Lay out any figure: its height in pixels, no background of its own, and the page's font."""
    return {
        "height": height,
        "font": _FONT,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"align": "left", "bgcolor": "theme:card", "bordercolor": "theme:line", "font": _FONT},
        "hovermode": "closest",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "theme:soft", "activecolor": "theme:ink"},
    }


def axis_title(text: str) -> JSON:
    """Write the title of an axis."""
    return {"text": text, "font": soft_font(12)}


def soft_font(size: int) -> JSON:
    """Choose the font of texts beside a figure; ``size`` in pixels."""
    return {"size": size, "color": "theme:soft"}


def thin_out(items: Sequence[_Item], limit: int = MAX_STEPS) -> Sequence[_Item]:
    """Keep every n-th of the items, ``limit`` at most."""
    return items[:: max(-(-len(items) // limit), 1)]


def finite_or_none(value: float | None) -> float | None:
    """Return the value, or ``None`` in place of NaN and infinities: JSON has neither."""
    return value if value is not None and math.isfinite(value) else None


def end_of_name(text: str, width: int) -> str:
    """Shorten a name to its end of ``width`` characters, since the end tells it from others."""
    return text if len(text) <= width else f"…{text[-width + 1 :]}"
