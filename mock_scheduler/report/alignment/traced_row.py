"""The tokens of a row out of a trace, for programs without a recording."""

from __future__ import annotations

from itertools import groupby

import torch

from mock_scheduler.report.recording.show import Stretch
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import TraceReader

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
