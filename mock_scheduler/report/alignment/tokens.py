"""Finds the worst sample of a candidate, and the distance of the two runs at each of its tokens.

Contract: read from both runs' traces, or from the ones of localising. The sample is the first divergence's
where its tensor has tokens; else the one with the largest difference of a log-probability, or of whatever tensor names
a sample. An unreadable trace counts as absent. Programs without a recording have a row's tokens in their trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from mock_scheduler.comparison.pairing.tokens import align_tokens
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.errors import MockSchedulerError
from mock_scheduler.report.recording.show import Stretch
from mock_scheduler.support.run_files import TRACE_FOLDER
from mock_scheduler.support.text import in_words
from mock_scheduler.trace.entries import STEP_KINDS, TraceKey
from mock_scheduler.trace.full.reader import TraceReader, open_trace
from mock_scheduler.verdict.results import CandidateResult

MAX_ELEMENTS = 1 << 26  # of a tensor that is read for this
#: Kinds whose value at a position is about the token after it, which is predicted there; it is shown at that token.
_PREDICTIONS: frozenset[TraceKind] = frozenset({"score", "advantage", "output", "loss"})
_SCORES: tuple[tuple[TraceKind, str], ...] = (
    ("output", "logprobs"),
    ("score", "old_logprobs"),
    ("loss", "ratio"),
    ("loss", "lm_loss"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenSample:
    """A row of a step, and its tokens' differences in ``tensor``; ``values`` are empty where none could be read."""

    step: int
    identity: str
    tensor: str = ""
    values: tuple[float | None, ...] = ()
    problem: str = ""


@contextmanager
def open_if_there(trace_dir: Path) -> Iterator[TraceReader | None]:
    """A trace's reader; ``None`` where it cannot be read, or has sketches only."""
    try:
        reader = open_trace(trace_dir)
    except (MockSchedulerError, OSError):
        yield None
        return
    with reader:
        yield reader


def choose_sample(candidate: CandidateResult, baseline: TraceReader | None) -> ChosenSample | None:
    """Choose the sample to show; ``None`` where none differs or can be named. ``baseline``: its trace, if any."""
    verdict = candidate.verdict
    if verdict.tensors is None or candidate.run is None:
        return None
    differing = [item for item in verdict.tensors.differences if not item.bit_equal]
    first = None if verdict.first is None else verdict.first.difference
    named = _worst_named([first] if first is not None else differing)
    wanted = [item.key for item in (first, *_scores(differing), named) if item is not None]
    with open_if_there(candidate.run.output_dir / TRACE_FOLDER) as reader:
        chosen = _first_readable(wanted, baseline, reader)
    if chosen is None and candidate.localisation is not None:
        folders = candidate.localisation.trace_dirs
        with open_if_there(folders[0]) as mine, open_if_there(folders[1]) as other:
            chosen = _first_readable(wanted, mine, other)
    return chosen or (None if named is None else _named_sample(named))


def _worst_named(differing: Sequence[TensorDifference]) -> TensorDifference | None:
    """Find the tensor furthest from its bound among all with a sample's name."""
    return min((item for item in differing if _sample_of(item) is not None), key=lambda item: item.margin, default=None)


def _sample_of(difference: TensorDifference) -> str | None:
    """The row with the largest difference; ``None`` where the tensor has no tokens, or its figures are not known."""
    figures = difference.figures
    return None if figures is None or figures.worst is None else figures.worst.sample


def _named_sample(difference: TensorDifference) -> ChosenSample:
    """Make the sample of a tensor without readable tokens."""
    problem = f"the traces with the tokens of {difference.key.describe()} cannot be read any more"
    return ChosenSample(step=difference.key.step, identity=_sample_of(difference) or "", problem=problem)


def _scores(differing: Sequence[TensorDifference]) -> list[TensorDifference]:
    """Returns log-probabilities, the furthest from their bound first."""
    found = [item for item in differing if (item.key.kind, item.key.name) in _SCORES]
    return sorted(found, key=lambda item: item.margin)


def _first_readable(
    wanted: Sequence[TraceKey], baseline: TraceReader | None, candidate: TraceReader | None
) -> ChosenSample | None:
    """Find the first tensor with tokens in both traces and a difference at one."""
    if baseline is None or candidate is None:
        return None
    chosen = (_read_tokens(key, baseline, candidate) for key in wanted)
    return next((item for item in chosen if item is not None), None)


def _read_tokens(key: TraceKey, baseline: TraceReader, candidate: TraceReader) -> ChosenSample | None:
    """Find the row with the largest difference, and each token's; ``None`` without tokens."""
    try:
        if not all(_has_tokens(reader, key) for reader in (baseline, candidate)):
            return None
        values = _token_differences(baseline, candidate, key)
        rows = baseline.footer(key.step).rows
    except (MockSchedulerError, OSError):
        return None
    if not bool((values > 0).any()):
        return None
    row, _ = rows.find(int(values.nan_to_num(nan=-1.0).argmax()))
    start = sum(rows.lengths[:row])
    own = values[start : start + rows.lengths[row]].tolist()
    own = [math.nan, *own[:-1]] if key.kind in _PREDICTIONS else own
    return ChosenSample(
        step=key.step,
        identity=rows.identities[row],
        tensor=_name(key),
        values=tuple(None if math.isnan(value) else value for value in own),
    )


def _name(key: TraceKey) -> str:
    return f"{in_words(key.kind)} {key.name}" + ("" if key.kind in STEP_KINDS else f", update {key.update}")


def _has_tokens(reader: TraceReader, key: TraceKey) -> bool:
    if not reader.has(key) or reader.dims(key)[:1] != ("token",):
        return False
    return torch.Size(reader.dtype_and_shape(key)[1]).numel() <= MAX_ELEMENTS


def _token_differences(baseline: TraceReader, candidate: TraceReader, key: TraceKey) -> torch.Tensor:
    """float64 ``[T]``: the largest |a - b| of each of the baseline's tokens; NaN where a side has no value."""
    sides = [baseline.merge(key), candidate.merge(key, may_lack_tokens=True)]
    aligned = align_tokens(*(reader.footer(key.step).rows for reader in (baseline, candidate)))
    values, known = [], []
    for side in sides:
        values.append(side.tensor.double().reshape(len(side.tensor), -1))
        present = torch.ones(len(side.tensor), 1, dtype=torch.bool) if side.present is None else side.present
        known.append(present.reshape(len(present), -1).any(dim=1))
    if not aligned.is_same_order:
        values[1] = aligned.in_baseline_order(values[1])
        known[1] = aligned.in_baseline_order(known[1]) & (aligned.index >= 0)
    largest = (values[0] - values[1]).abs().amax(dim=1)
    return largest.masked_fill(~(known[0] & known[1]), float("nan"))


_TOKENS, _LOSS_MASK = "tokens", "loss_mask"


def read_traced_row(reader: TraceReader, step: int, identity: str) -> tuple[Stretch, ...]:
    """Reads a row's tokens, in stretches with and without a loss; empty where its tokens were not traced whole.

    Without a traced loss mask all tokens are one stretch with a loss. Raises ``TraceError`` for a damaged file.
    """
    rows = reader.footer(step).rows if step in reader.steps else None
    if rows is None or identity not in rows.identities:
        return ()
    row = rows.identities.index(identity)
    start = rows.first_places[row]
    own = slice(start, start + rows.lengths[row])
    tokens = _read(reader, step, _TOKENS, own)
    if tokens is None:
        return ()
    mask = _read(reader, step, _LOSS_MASK, own)
    has_loss = [True] * len(tokens)
    if mask is not None:
        # A loss stands at the token that predicts: that at position p is of token p + 1.
        has_loss = [False, *(mask[:-1] != 0).tolist()]
    pairs = zip(has_loss, tokens.tolist(), strict=True)
    return tuple(
        Stretch(is_response=is_trained, tokens=tuple(token for _, token in group), logprobs=None)
        for is_trained, group in groupby(pairs, key=lambda pair: pair[0])
    )


def _read(reader: TraceReader, step: int, name: str, own: slice) -> torch.Tensor | None:
    """Gives a row of an input ``[T]``; ``None`` where it was not traced there."""
    key = TraceKey(step=step, update=0, kind="input", name=name)
    if not reader.has(key) or len(reader.dtype_and_shape(key)[1]) != 1:
        return None
    merged = reader.merge(key, may_lack_tokens=True)
    if merged.present is not None and not bool(merged.present[own].all()):
        return None
    return merged.tensor[own]
