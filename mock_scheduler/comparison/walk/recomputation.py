"""Holds a recomputation to its forward pass: a law of one run, since both compute one tensor of one micro-batch.

A probe writes the values of a recomputation only where their bits are not those of the forward pass, micro-batch by
micro-batch, so a tensor of this kind is a finding; here it is measured.
"""

from __future__ import annotations

from dataclasses import replace

from mock_scheduler.comparison.findings import Finding, OtherRecomputation, finding
from mock_scheduler.comparison.measure.figures import sum_pair
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import TraceReader

_FIRST_KINDS: tuple[TraceKind, ...] = ("activation", "router", "logits")


def find_other_recomputation(key: TraceKey, reader: TraceReader) -> Finding:
    """Measures how far a recomputed tensor is from that of the forward pass, where the trace has both.

    Raises:
        TraceError: A file is damaged.
    """
    first = next((own for kind in _FIRST_KINDS if reader.has(own := replace(key, kind=kind))), None)
    if first is None:
        return finding(key, OtherRecomputation())
    before, again = reader.merge(first, may_lack_tokens=True), reader.merge(key)
    figures = sum_pair(before.tensor, again.tensor, present=again.present).figures
    differs = before.tensor != again.tensor
    if again.present is not None:
        differs &= again.present
    tokens = differs.reshape(len(differs), -1).any(dim=1).nonzero()
    fact = OtherRecomputation(
        num_different=figures.num_different, num_elements=figures.num_elements, relative=figures.relative
    )
    rows = reader.footer(key.step).rows
    if len(tokens) and rows.num_tokens == len(differs):
        sample, position = rows.find(int(tokens[0]))
        fact = replace(fact, sample=rows.identities[sample], position=position)
    return finding(key, replace(fact, micro_batch=_find_micro_batch(key, first, reader)))


def _find_micro_batch(key: TraceKey, first: TraceKey, reader: TraceReader) -> int | None:
    """Finds which of a rank's pieces of the forward pass the first recomputed one stands for."""
    piece = reader.pieces(key)[0]
    own = [item for item in reader.pieces(first) if item.place.global_rank == piece.place.global_rank]
    places = [item.spec.elements for item in own]
    return places.index(piece.spec.elements) if piece.spec.elements in places else None
