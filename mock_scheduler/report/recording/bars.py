"""Histograms drawn in text: one line per bar, as wide as asked for.

Contract: the longest bar fills its column; a bar with any count shows something. Without Unicode, bars are of ``#``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mock_scheduler.recording.inspection.histogram import Bar

_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEAST_WIDTH = 4


def draw_bars(bars: Sequence[Bar], *, width: int, ascii_only: bool = False) -> Iterator[str]:
    """Lines of at most ``width`` columns, as long as labels and counts leave room: ``0.5   12 ██████``."""
    labels = [_label(bar) for bar in bars]
    counts = [f"{bar.count:,}" for bar in bars]
    label_width, count_width = (max(map(len, texts), default=0) for texts in (labels, counts))
    room = max(width - label_width - count_width - 3, _LEAST_WIDTH)
    most = max((bar.count for bar in bars), default=0)
    for label, count, bar in zip(labels, counts, bars, strict=True):
        drawn = _draw(bar.count / most if most else 0.0, room, ascii_only=ascii_only)
        yield f"{label:>{label_width}}  {count:>{count_width}} {drawn}".rstrip()


def _label(bar: Bar) -> str:
    return f"{bar.low:g}" if bar.low == bar.high else f"{bar.low:g} to {bar.high:g}"


def _draw(fraction: float, room: int, *, ascii_only: bool) -> str:
    if ascii_only:
        return "#" * (round(fraction * room) or (fraction > 0))
    eighths = round(fraction * room * 8) or (fraction > 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
