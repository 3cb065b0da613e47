"""Histograms in text."""

from __future__ import annotations

from mock_scheduler.recording.inspection.histogram import Bar
from mock_scheduler.report.recording.description import draw_bars

BARS = (Bar(low=-1.0, high=-1.0, count=1), Bar(low=0.5, high=0.5, count=1600), Bar(low=2.0, high=2.0, count=400))


def test_bars_fill_the_width_in_eighths_and_any_count_shows() -> None:
    """20 columns: 3 for the label, 2 + 5 for the count, 1 + 9 for the bar: of 72 eighths, 400 of 1,600 fill 18."""
    assert list(draw_bars(BARS, width=20)) == [
        " -1      1 ▏",
        "0.5  1,600 █████████",
        "  2    400 ██▎",
    ]


def test_without_unicode_bars_are_hashes() -> None:
    assert list(draw_bars(BARS, width=20, ascii_only=True)) == [
        " -1      1 #",
        "0.5  1,600 #########",
        "  2    400 ##",
    ]


def test_bins_are_labelled_by_their_edges() -> None:
    bins = (Bar(low=0, high=5, count=2), Bar(low=5, high=10, count=0))
    assert list(draw_bars(bins, width=18)) == [" 0 to 5  2 ███████", "5 to 10  0"]


def test_a_narrow_terminal_still_gets_bars() -> None:
    assert list(draw_bars(BARS[1:2], width=1)) == ["0.5  1,600 ████"]


def test_nothing_draws_nothing() -> None:
    assert list(draw_bars((), width=80)) == []
