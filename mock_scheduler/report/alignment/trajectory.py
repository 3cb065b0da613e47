"""Shades a trajectory for the page: its turns as pieces of text, each as dark as the two runs are apart at its tokens.

Contract: shades are decades below the largest difference of the row. The worst token has a piece of its own, and the
five worst are listed with their numbers, so that nothing is said by colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from mock_scheduler.report.alignment.sample import SampleTurn, SampleView
from mock_scheduler.report.comparison.view import format_size

_NUM_WORST = 5
_NEWLINE = "⏎\n"
_SHADES = ((0.5, "m4"), (0.1, "m3"), (0.01, "m2"), (0.0, "m1"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Consecutive tokens of one shade. before: the space that parts it from the piece before. shade: empty for none."""

    before: str
    text: str
    shade: str
    is_worst: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnTurn:
    """Tokens of one origin in pieces."""

    title: str
    note: str
    is_response: bool
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSample:
    """A trajectory. worst: position, turn, text and difference of its worst tokens, worst first."""

    max_difference: str
    worst: tuple[tuple[int, str, str, str], ...]
    turns: tuple[DrawnTurn, ...]


def draw_sample(sample: SampleView) -> DrawnSample:
    """Shade all turns, and list the worst tokens."""
    return DrawnSample(
        max_difference=format_size(sample.max_difference or 0.0),
        worst=tuple(_list_worst(sample)),
        turns=tuple(
            DrawnTurn(
                title=turn.title,
                note=turn.note,
                is_response=turn.is_response,
                pieces=tuple(_shade_turn(turn, sample)),
            )
            for turn in sample.turns
        ),
    )


def _list_worst(sample: SampleView) -> list[tuple[int, str, str, str]]:
    tokens = [
        (difference, turn, number)
        for turn in sample.turns
        for number, difference in enumerate(turn.differences)
        if difference
    ]
    return [
        (turn.first_position + number, turn.title, _show(turn.texts[number]), format_size(difference))
        for difference, turn, number in sorted(tokens, key=lambda item: -item[0])[:_NUM_WORST]
    ]


def _shade_turn(turn: SampleTurn, sample: SampleView) -> Iterator[Piece]:
    most = sample.max_difference or 0.0
    shaded = [
        (_shade(difference, most), turn.first_position + number == sample.worst_position, _show(text))
        for number, (text, difference) in enumerate(zip(turn.texts, turn.differences, strict=True))
    ]
    before = ""
    for (shade, is_worst), run in groupby(shaded, key=lambda item: item[:2]):
        text = _join([token for _, _, token in run])
        yield Piece(before=before, text=text, shade=shade, is_worst=is_worst)
        before = "" if text.endswith(_NEWLINE) else " "


def _join(texts: Sequence[str]) -> str:
    """Texts with spaces between them, but none at the beginning of a line."""
    joined = ""
    for text in texts:
        joined += f"{'' if not joined or joined.endswith(_NEWLINE) else ' '}{text}"
    return joined


def _show(text: str) -> str:
    """A token's text, with a sign where it begins a new line."""
    return text.replace("\n", _NEWLINE) or "∅"


def _shade(difference: float | None, most: float) -> str:
    if not difference or not most:
        return ""
    return next(shade for least, shade in _SHADES if difference > least * most)
