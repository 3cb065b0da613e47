"""A trajectory on an alignment's page: its turns as text, each token shaded by how far apart the two runs are at it.

Contract: HTML out of a view alone. Shades are decades below the largest difference of the row; the worst token is
outlined, and the five worst are listed with their numbers, so that nothing is said by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from mock_scheduler.report.alignment.sample import SampleTurn, SampleView
from mock_scheduler.report.comparison.view import format_size
from mock_scheduler.support.text import count_of

_NUM_WORST = 5
_NEWLINE = "⏎\n"
_SHADES = ((0.5, "m4"), (0.1, "m3"), (0.01, "m2"), (0.0, "m1"))


def sample_html(sample: SampleView) -> str:
    """The sample's identity, its worst tokens and its turns."""
    of = f"; shaded: largest |a-b| of each token in {sample.tensor}" if sample.tensor else ""
    summary = f": {sample.summary}" if sample.summary else ""
    parts = [f"<p><b>{escape(sample.identity)}</b>, step {sample.step}{escape(summary)}{escape(of)}</p>"]
    if sample.problem:
        parts.append(f'<p class="note">{escape(sample.problem)}</p>')
    if sample.num_cut:
        parts.append(f'<p class="note">{count_of(sample.num_cut, "token")} far from the worst are left out.</p>')
    parts.append(_worst_table(sample))
    parts += [_turn(turn, sample) for turn in sample.turns]
    return "".join(parts)


def _worst_table(sample: SampleView) -> str:
    tokens = [
        (difference, turn, number)
        for turn in sample.turns
        for number, difference in enumerate(turn.differences)
        if difference
    ]
    if not tokens:
        return ""
    worst = sorted(tokens, key=lambda item: -item[0])[:_NUM_WORST]
    rows = "".join(
        f'<tr><td class="n">{turn.first_position + number}</td><td>{escape(turn.title)}</td>'
        f'<td class="name">{escape(_visible(turn.texts[number]))}</td><td class="n">{format_size(difference)}</td></tr>'
        for difference, turn, number in worst
    )
    return (
        '<table style="width:auto"><thead><tr><th scope="col" class="n">token</th><th scope="col">in</th>'
        '<th scope="col">text</th><th scope="col" class="n">largest |a-b|</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _turn(turn: SampleTurn, sample: SampleView) -> str:
    classes = "turn resp" if turn.is_response else "turn"
    return (
        f'<div class="{classes}"><h5>{escape(turn.title)} <span class="note">· {escape(turn.note)}</span></h5>'
        f"<p>{_tokens(turn, sample)}</p></div>"
    )


def _tokens(turn: SampleTurn, sample: SampleView) -> str:
    """Tokens of one shade stand in one element; the worst has its own."""
    most = sample.max_difference or 0.0
    shaded = [
        (_shade(difference, most), turn.first_position + number == sample.worst_position, _visible(text))
        for number, (text, difference) in enumerate(zip(turn.texts, turn.differences, strict=True))
    ]
    pieces = []
    for (shade, is_worst), run in groupby(shaded, key=lambda item: item[:2]):
        text = escape(_join([token for _, _, token in run]))
        worst = f' title="largest |a-b| {format_size(most)}"' if is_worst else ""
        pieces.append(f'<mark class="{shade}{" worst" if is_worst else ""}"{worst}>{text}</mark>' if shade else text)
    return _join(pieces)


def _join(texts: Sequence[str]) -> str:
    """Texts with spaces between them, but none at the beginning of a line."""
    joined = ""
    for text in texts:
        joined += f"{'' if not joined or joined.endswith(_NEWLINE) else ' '}{text}"
    return joined


def _visible(text: str) -> str:
    """A token's text, with a sign where it begins a new line."""
    return text.replace("\n", _NEWLINE) or "∅"


def _shade(difference: float | None, most: float) -> str:
    if not difference or not most:
        return ""
    return next(shade for least, shade in _SHADES if difference > least * most)
