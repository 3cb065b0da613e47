"""An alignment as one HTML page that opens offline: verdicts first, then each candidate with its evidence.

Contract: without a library: figures are tables and SVG, and a page of a hundred candidates stays below a few
megabytes. The templates lay out the view of terminal and JSON, and the additions of this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.display.pages import render_page, write_page
from mock_scheduler.errors import ExitCode, UnwrittenError
from mock_scheduler.report.alignment.curves import CurveDrawing, draw_curve
from mock_scheduler.report.alignment.sample import DrawnSample, draw_sample
from mock_scheduler.report.alignment.view import AlignmentView, CandidateView
from mock_scheduler.verdict.verdict import VerdictKind
from mock_scheduler.verdict.wording.verdicts import (
    DISTANCE_OF_ORDER,
    EXIT_MEANINGS,
    LEGEND,
    NOT_LOOKED_AT,
    PROOF_MARKS,
    PROOF_MEANINGS,
)

_NUM_OPEN = 6
_NUM_DETAILED = 5
_DENSE_COLUMNS = 24  # from which on cells of a heat map have no room for texts
_SENTENCE_WIDTH = 190
_READING = (
    "A verdict holds for the steps, layers and tokens that were run: a change that they never exercise is identical.",
    "Equal losses prove nothing; gradients, parameters and, where traced, what lies between them decide.",
    "Bounds are each tensor's own, and a share of 100 % is the bound; what is not judged is no larger than rounding.",
    "a is the baseline, b the candidate; relative difference: ||a-b|| / ||a||, of a parameter that of its change.",
)
_HEAT_SHADES = (
    ("equal", "equal bits (=)"),
    ("in1", "below 0.1 % of its bound"),
    ("in2", "up to 1 %"),
    ("in3", "up to 10 %"),
    ("in4", "up to its bound"),
    ("out1", "beyond its bound, up to 10×"),
    ("out2", "up to 1,000×"),
    ("out3", "more"),
    ("unjudged", "not judged (~)"),
    ("none", "no number (?)"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrix:
    """Candidates by layout and option; ``None`` where there is none. others: whose names are neither."""

    options: tuple[str, ...]
    rows: tuple[tuple[str, tuple[CandidateView | None, ...]], ...]
    others: tuple[CandidateView, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _DrawnCandidate:
    """Holds the page's additions to a candidate's view. change: what it
    changes of the baseline; texts: the verdict in words; rows: labels and texts.
    """

    is_open: bool
    change: str
    first_sentence: str
    texts: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]
    curves: tuple[CurveDrawing, ...]
    curves_note: str
    sample: DrawnSample | None


def write_alignment_page(view: AlignmentView, path: Path) -> None:
    """Write the page to ``path``, whole or not at all; folders are made.

    Raises ``AlignmentError`` where it cannot be written.
    """
    write_page(render_alignment_page(view), path, UnwrittenError)


def render_alignment_page(view: AlignmentView) -> str:
    """Render the page."""
    return render_page(
        "mock_scheduler.report",
        "alignment.html",
        title=f"Alignment of {view.config_name}: {view.headline}",
        heading=f"Alignment of {view.config_name}",
        origin=view.origin,
        footer=f"Results in {view.output_dir}",
        view=view,
        word=view.counts[0][0].value if view.counts else "nothing to compare",
        sentence=f"{view.headline}. Exit code {view.exit_code}: {EXIT_MEANINGS[ExitCode(view.exit_code)]}.",
        matrix=_arrange(view.candidates) if view.is_matrix else None,
        drawn={item.anchor: _draw_candidate(item, is_open=is_open) for item, is_open in _open_some(view.candidates)},
        baseline_rows=[
            ("layout", view.baseline_layout),
            *([("own code", view.baseline_code)] if view.baseline_code else []),
            *([("recording", view.recording_dir)] if view.recording_dir else []),
            *view.baseline_ledger,
        ],
        marks=PROOF_MARKS,
        legend=LEGEND,
        proof_meanings=PROOF_MEANINGS,
        reading=_READING,
        heat_shades=_HEAT_SHADES,
        dense_columns=_DENSE_COLUMNS,
        detailed_tensors=_NUM_DETAILED,
    )


def _open_some(candidates: Sequence[CandidateView]) -> Iterator[tuple[CandidateView, bool]]:
    """Pair each with whether it lies open: the first few failing ones do, and an only one."""
    failing = [item.anchor for item in candidates if not item.passes][:_NUM_OPEN]
    return ((item, item.anchor in failing or len(candidates) == 1) for item in candidates)


def _arrange(candidates: Sequence[CandidateView]) -> _Matrix:
    placed = [item for item in candidates if item.layout_name]
    cells = {(item.layout_name, item.option): item for item in placed}
    options = tuple(dict.fromkeys(item.option for item in placed))
    return _Matrix(
        options=options,
        rows=tuple(
            (layout, tuple(cells.get((layout, option)) for option in options))
            for layout in dict.fromkeys(item.layout_name for item in placed)
        ),
        others=tuple(item for item in candidates if not item.layout_name),
    )


def _draw_candidate(candidate: CandidateView, *, is_open: bool) -> _DrawnCandidate:
    verdict, metrics = candidate.verdict, candidate.metrics
    texts = (verdict.headline, verdict.first_divergence, verdict.reason)
    drawn = sum(not curve.bit_equal for curve in metrics.curves)
    number = metrics.num_differing
    return _DrawnCandidate(
        is_open=is_open,
        change=_describe_change(candidate),
        first_sentence=_cut(verdict.headline),
        texts=tuple(dict.fromkeys(filter(None, texts))),
        rows=tuple((label, text) for label, text in _verdict_rows(candidate) if text),
        curves=tuple(draw_curve(curve) for curve in metrics.curves if curve.steps),
        curves_note=f"Drawn are {drawn} of {number} metrics that differ." if drawn < number else "",
        sample=None if candidate.sample is None else draw_sample(candidate.sample),
    )


def _describe_change(candidate: CandidateView) -> str:
    setup = candidate.setup
    own = (*setup.overrides, *([f"entry={setup.entry}"] if setup.entry else []), *setup.versions)
    return ", ".join(own) or "nothing"


def _cut(text: str) -> str:
    """The text, or as many of its words as a line has room for."""
    return text if len(text) <= _SENTENCE_WIDTH else f"{text[: text.rfind(' ', 0, _SENTENCE_WIDTH)]} …"


def _verdict_rows(candidate: CandidateView) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of the verdict's grounds; a text is empty where there is nothing to say."""
    setup, worst = candidate.setup, candidate.differences.worst
    yield "layout", setup.layout
    yield "overrides", " ".join(setup.overrides)
    yield "entry", setup.entry
    yield "own code", setup.own_code
    code = (f"its module {setup.entry}",) if setup.entry else ()
    yield "may move a bit", ", ".join((*setup.changes, *code))
    yield "proved by", candidate.verdict.proved_by
    yield "would have been found", candidate.verdict.smallest_error
    yield NOT_LOOKED_AT, candidate.verdict.unseen
    yield "outside the proof", candidate.verdict.outside
    if worst is not None:
        where = f"{worst.kind} of {worst.name} at step {worst.step}, update {worst.update}"
        why = "" if candidate.verdict.kind is not VerdictKind.EMULATED else f": {DISTANCE_OF_ORDER}"
        yield "worst against the baseline", f"{where}: {worst.relative}, bound {worst.bound} ({worst.ratio}){why}"
    yield "in its order", candidate.differences.emulated
    yield "other versions", ", ".join(setup.versions)
    yield "metrics", candidate.metrics.equal
    yield "run", candidate.run.run_dir
    yield "its output", candidate.run.log_path
