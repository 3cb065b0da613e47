"""The trajectory of the worst sample of a candidate, turn by turn, with how far apart the runs are at each token.

Contract: read from the recording, or the traced tokens of a program without one, and both runs' traces. The sample is
that of the first divergence where its tensor has tokens; else the one with the largest difference of a log-probability,
or of whatever tensor names a sample. Never fails: ``problem`` says why a part cannot be shown. A trajectory of more
than ``MAX_TOKENS`` is cut around its worst token. On the page each token is as dark as the two runs are apart there, in
decades below the row's largest difference; the worst token stands alone, and the five worst are listed with their
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import MockSchedulerError
from mock_scheduler.recording.inspection.vocabulary import Vocabulary
from mock_scheduler.recording.reading.browse import list_recording, open_place
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.report.alignment.tokens import ChosenSample, choose_sample, read_traced_row
from mock_scheduler.report.recording.show import Stretch, find_row, has_logprobs, recorded_vocabulary, split_stretches
from mock_scheduler.support.text import count_of
from mock_scheduler.trace.full.reader import TraceReader
from mock_scheduler.verdict.results import CandidateResult
from mock_scheduler.verdict.wording.tensors import format_size

MAX_TOKENS = 1500
#: Titles of tokens with and without a loss, where no recording tells turns.
_TRAINED, _CONTEXT = "with a loss", "without a loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTurn:
    """Consecutive tokens of one origin. title: ``prompt``, ``turn 0`` or ``environment``. differences: of each token,
    the largest |a - b| of its elements; ``None`` where the tensor has no value. is_response: sampled by the policy.
    """

    title: str
    note: str
    is_response: bool
    first_position: int
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    differences: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleView:
    """One trajectory. tensor: whose differences its tokens have; empty where none could be read. worst_position,
    max_difference: of them. num_cut: omitted tokens. problem: why all or a part of it cannot be shown.
    """

    step: int
    identity: str
    summary: str
    tensor: str
    worst_position: int | None
    max_difference: float | None
    num_cut: int
    turns: tuple[SampleTurn, ...]
    problem: str = ""


def find_worst_sample(
    candidate: CandidateResult, baseline: TraceReader | None, recording_dir: Path | None
) -> SampleView | None:
    """The worst sample's trajectory; ``None`` where no sample differs or none can be named.

    ``baseline``: the baseline's trace; ``None`` where it cannot be read.
    """
    chosen = choose_sample(candidate, baseline)
    if chosen is None:
        return None
    empty = SampleView(
        step=chosen.step, identity=chosen.identity, summary="", tensor=chosen.tensor, worst_position=None,
        max_difference=None, num_cut=0, turns=(), problem=chosen.problem,
    )  # fmt: skip
    try:
        if recording_dir is None:
            return _read_traced_sample(chosen, baseline, empty)
        return _read_sample(chosen, recording_dir, empty)
    except (MockSchedulerError, OSError) as error:
        return replace(empty, problem=str(error))


def _read_sample(chosen: ChosenSample, recording_dir: Path, empty: SampleView) -> SampleView:
    reader = RecordingReader(str(recording_dir))
    places = {
        place.step: place
        for listing in list_recording(reader.storage)
        for place in listing.places.values()
        if place.mode == "train" and chosen.identity.startswith(f"{place.scheduler_id}/")
    }
    if chosen.step not in places:
        return replace(empty, problem=f"step {chosen.step} is not in the recording {recording_dir}")
    batch = open_place(reader, places[chosen.step]).load()
    row = find_row(batch, chosen.identity, where=f"{recording_dir}: {places[chosen.step]}")
    return _describe_sample(batch, row, chosen, empty, vocabulary=recorded_vocabulary(reader))


def _read_traced_sample(chosen: ChosenSample, baseline: TraceReader | None, empty: SampleView) -> SampleView:
    stretches = () if baseline is None else read_traced_row(baseline, chosen.step, chosen.identity)
    if not stretches:
        return replace(empty, problem="its text is not known: the run has no recording")
    parts = [(stretch, _TRAINED if stretch.is_response else _CONTEXT, "") for stretch in stretches]
    num_tokens = sum(len(stretch.tokens) for stretch in stretches)
    return _lay_out(parts, chosen, empty, summary=count_of(num_tokens, "token"), vocabulary=None)


def _describe_sample(
    batch: RolloutBatch, row: int, chosen: ChosenSample, empty: SampleView, *, vocabulary: Vocabulary | None
) -> SampleView:
    trajectory = batch.rows()[row]
    num_tokens = len(trajectory.tokens)
    stretches = list(split_stretches(trajectory, has_logprobs=has_logprobs(batch)))
    reward = float(batch.rewards[row])
    responses = sum(stretch.is_response for stretch in stretches)
    by_turn = responses == len(trajectory.turn_rewards)
    parts: list[tuple[Stretch, str, str]] = []
    position, number = 0, 0
    for stretch in stretches:
        title = _title(stretch, position, number if by_turn else None)
        note = f"reward {float(trajectory.turn_rewards[number]):g}" if stretch.is_response and by_turn else ""
        number += stretch.is_response
        parts.append((stretch, title, note))
        position += len(stretch.tokens)
    summary = (
        f"{trajectory.termination.name.lower()}, reward {reward:g}, {count_of(num_tokens, 'token')}, "
        f"{len(trajectory.rollout_logprobs):,} of them sampled"
    )
    return _lay_out(parts, chosen, empty, summary=summary, vocabulary=vocabulary)


def _lay_out(
    parts: Sequence[tuple[Stretch, str, str]],
    chosen: ChosenSample,
    empty: SampleView,
    *,
    summary: str,
    vocabulary: Vocabulary | None,
) -> SampleView:
    """Lays out stretches with their titles and notes, cut around the worst token."""
    num_tokens = sum(len(stretch.tokens) for stretch, _, _ in parts)
    values = chosen.values if len(chosen.values) == num_tokens else (None,) * num_tokens
    known = [(value, position) for position, value in enumerate(values) if value is not None]
    largest, worst = max(known, key=lambda item: item[0], default=(None, None))
    start = max(min((worst or 0) - MAX_TOKENS // 2, num_tokens - MAX_TOKENS), 0)
    turns: list[SampleTurn] = []
    position = 0
    for stretch, title, note in parts:
        turn = _turn(stretch, position, values, title=title, note=note, vocabulary=vocabulary)
        turns += _cut(turn, start, start + MAX_TOKENS)
        position += len(stretch.tokens)
    return replace(
        empty,
        summary=summary,
        worst_position=worst,
        max_difference=largest,
        num_cut=max(num_tokens - MAX_TOKENS, 0),
        turns=tuple(turns),
    )


def _title(stretch: Stretch, position: int, turn: int | None) -> str:
    if not stretch.is_response:
        return "environment" if position else "prompt"
    return "response" if turn is None else f"turn {turn}"


def _turn(
    stretch: Stretch,
    position: int,
    values: Sequence[float | None],
    *,
    title: str,
    note: str,
    vocabulary: Vocabulary | None,
) -> SampleTurn:
    own = tuple(values[position : position + len(stretch.tokens)])
    largest = max((value for value in own if value is not None), default=None)
    notes = [count_of(len(stretch.tokens), "token"), note]
    notes += [f"largest |a-b| {format_size(largest)}"] if largest is not None else []
    return SampleTurn(
        title=title,
        note=", ".join(filter(None, notes)),
        is_response=stretch.is_response,
        first_position=position,
        tokens=stretch.tokens,
        texts=tuple(str(token) if vocabulary is None else vocabulary.decode([token]) for token in stretch.tokens),
        differences=own,
    )


def _cut(turn: SampleTurn, start: int, end: int) -> list[SampleTurn]:
    """Cut the part of a turn between two positions of its row; empty where there is none."""
    first = max(start - turn.first_position, 0)
    last = min(end - turn.first_position, len(turn.tokens))
    if first >= last:
        return []
    return [
        replace(
            turn,
            first_position=turn.first_position + first,
            tokens=turn.tokens[first:last],
            texts=turn.texts[first:last],
            differences=turn.differences[first:last],
        )
    ]


_NUM_WORST = 5
_NEWLINE = "⏎\n"
_SHADES = ((0.5, "m4"), (0.1, "m3"), (0.01, "m2"), (0.0, "m1"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Holds consecutive tokens of one shade. before: the space after the piece before. shade: empty for none."""

    before: str
    text: str
    shade: str
    is_worst: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnTurn:
    """Holds tokens of one origin in pieces."""

    title: str
    note: str
    is_response: bool
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSample:
    """Holds a trajectory. worst: position, turn, text and difference of its worst tokens, worst first."""

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
    """Returns texts with spaces between them, but none at the beginning of a line."""
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
