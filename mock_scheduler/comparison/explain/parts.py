"""Partial sums: ranks of the candidate hold values of their own where they must hold copies of one tensor.

Contract: the values at each place of an axis are added up and averaged, and held against the baseline; then some of
them alone are. At most 1 Mi evenly spaced elements are looked at, of one place at a time, so memory is bounded by one
tensor. Only ranks with pieces covering all compared elements count, since pieces of a shard are no partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mock_scheduler.comparison.explain.ratios import name_factor, only_enough
from mock_scheduler.comparison.explain.residual import classify_residual
from mock_scheduler.comparison.pairing.pairs import TensorPair
from mock_scheduler.comparison.pairing.tokens import TokenAlignment
from mock_scheduler.comparison.residuals import Residual, Sample, UnreducedCopies, WrongCopies
from mock_scheduler.comparison.thresholds import (
    COPY_CLOSE,
    COPY_ROUNDING,
    FEWEST_COPY_ELEMENTS,
    MOST_PLACES,
    SAMPLE_ELEMENTS,
)
from mock_scheduler.trace.full.reader import ReplicaConflict, TraceReader


def classify_parts(
    pair: TensorPair,
    reader: TraceReader,
    tokens: TokenAlignment,
    conflicts: Sequence[ReplicaConflict],
    layout: Mapping[str, float],
) -> Residual | None:
    """Explains unequal copies of a tensor of the candidate in terms of the baseline.

    Args:
        pair: The tensor, in the baseline's order of tokens.
        reader: Of the candidate.
        tokens: Of both batches.
        conflicts: Of this tensor, within the candidate.
        layout: Numbers a factor may be.

    Raises:
        TraceError: A file is damaged.
    """
    # Single axes first: a fault of one axis looks like one of any group that has the axis in it.
    for axes in _choose_axes(conflicts):
        parts = _read_parts(pair, reader, tokens, axes)
        if parts is not None:
            found = _find_sum(parts, layout) or _find_some(parts)
            if found is not None:
                return replace(found, sample=parts.sample)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """Holds float64 ``[n]`` each: the baseline, the candidate, and the value at each named place of the axes."""

    axes: tuple[str, ...]
    baseline: torch.Tensor
    candidate: torch.Tensor
    values: Mapping[str, torch.Tensor]
    sample: Sample | None

    def explained(self, explanation: torch.Tensor, *, scale: float = 1.0) -> float:
        """Returns the part of ||a - b||² accounted for if ``explanation`` is ``scale`` times the baseline."""
        remainder = torch.sub(explanation, self.baseline, alpha=scale)
        # An explanation near the candidate but far from the baseline explains nothing.
        if float(remainder.norm()) > COPY_CLOSE * abs(scale) * float(self.baseline.norm()):
            return 0.0
        square = float((self.candidate - self.baseline).square().sum())
        return 1.0 - float(remainder.square().sum()) / square if square else 0.0


def _choose_axes(conflicts: Sequence[ReplicaConflict]) -> list[tuple[str, ...]]:
    """Lists single axes on which copies differ, then all of these together, then whatever else two ranks differ on."""
    found = dict.fromkeys(conflict.axes for conflict in conflicts if conflict.axes)
    single = [axes for axes in found if len(axes) == 1]
    together = tuple(dict.fromkeys(axis for axes in single for axis in axes))
    return list(dict.fromkeys([*single, *([together] if len(single) > 1 else []), *found]))


def _read_parts(pair: TensorPair, reader: TraceReader, tokens: TokenAlignment, axes: tuple[str, ...]) -> _Parts | None:
    """Reads each place; ``None`` where one does not hold all compared elements, or there are too many."""
    ranks: dict[tuple[int, ...], set[int]] = {}
    for piece in reader.pieces(pair.key):
        place = tuple(piece.place.coordinates.get(axis, 0) for axis in axes)
        ranks.setdefault(place, set()).add(piece.place.global_rank)
    count = pair.baseline.numel()
    stride = max(math.ceil(count / SAMPLE_ELEMENTS), 1)
    # Columns are mostly even in number, so that an even stride would never see half of them.
    stride += stride > 1 and stride % 2 == 0
    mask = None if pair.present is None else pair.present.expand(pair.baseline.shape).reshape(-1)[::stride]

    def sample(tensor: torch.Tensor) -> torch.Tensor:
        values = tensor.reshape(-1)[::stride]
        return (values if mask is None else values[mask]).double()

    values: dict[str, torch.Tensor] = {}
    for place in sorted(ranks) if 1 < len(ranks) <= MOST_PLACES else ():
        merged = reader.merge(pair.key, ranks=ranks[place])
        tensor, present = merged.tensor, merged.present
        if pair.dims[:1] == ("token",) and tokens.covers(pair.baseline, tensor):
            tensor = tokens.in_baseline_order(tensor)
            present = None if present is None else tokens.in_baseline_order(present)
        # A place without some of the elements is no copy, and its sum would lack them.
        if tensor.shape != pair.baseline.shape or not _covers(present, pair.present):
            return None
        name = " ".join(f"{axis}{number}" for axis, number in zip(axes, place, strict=True))
        values[name] = sample(tensor)
    baseline, candidate = sample(pair.baseline), sample(pair.candidate)
    # Any few numbers are the sum of some others.
    if len(values) < 2 or len(baseline) < FEWEST_COPY_ELEMENTS:
        return None
    seen = Sample(num_seen=len(baseline), num_elements=count) if stride > 1 else None
    return _Parts(axes=axes, baseline=baseline, candidate=candidate, values=values, sample=seen)


def _covers(present: torch.Tensor | None, needed: torch.Tensor | None) -> bool:
    if present is None:
        return True
    return bool(present.all()) if needed is None else not bool((needed & ~present).any())


def _find_sum(parts: _Parts, layout: Mapping[str, float]) -> Residual | None:
    """Finds that the values at all places add up to the baseline, to a named multiple of it, or are it on average.

    Copies apart by rounding alone are no parts, even where they are the baseline divided by their number.
    """
    values = torch.stack(list(parts.values.values()))
    total = values.sum(0)
    square = float(parts.baseline.square().sum())
    # Copies that are equal but for rounding are right, and something else is wrong.
    if not square or float((values - values[0]).norm()) <= COPY_ROUNDING * float(values.norm()):
        return None
    # The least-squares multiple of the baseline that the sum of the parts is.
    scale, count = float(total.dot(parts.baseline)) / square, len(parts.values)
    copies = UnreducedCopies(axes=parts.axes, reduction="sum")
    # Each rank has its own share, and nobody added them: an all-reduce was left out.
    if abs(scale - 1.0) <= COPY_CLOSE:
        scale = 1.0
    # Each rank has the mean over its own samples, and nobody averaged: the sum is their number times the baseline.
    elif abs(scale / count - 1.0) <= COPY_CLOSE:
        scale, copies = float(count), replace(copies, reduction="mean")
    else:
        # Any tensor is some multiple of another in part; only a number of the layout is somebody's mistake.
        factor = name_factor(scale, layout) if scale > 0 else None
        if factor is None:
            return None
        copies = replace(copies, reduction="multiple", factor=factor)
    explained = parts.explained(total, scale=scale)
    return only_enough(Residual(kind="missing part", value=scale, explained=explained, detail=copies))


def _find_some(parts: _Parts) -> Residual | None:
    """Finds places with the baseline's values beside places without; or places whose values are missing, or there
    twice.
    """
    norm = float(parts.baseline.norm())
    # Places whose copies are the baseline's say at once which ranks are at fault.
    right = [
        name for name, values in parts.values.items() if float((values - parts.baseline).norm()) <= COPY_ROUNDING * norm
    ]
    wrong = [name for name in parts.values if name not in right]
    if right and wrong:
        copies = WrongCopies(right=tuple(right), wrong=tuple(wrong))
        return Residual(kind="missing part", value=1.0, explained=1.0, detail=copies)
    found = classify_residual(
        parts.baseline, parts.candidate, parts=list(parts.values.values()), part_names=tuple(parts.values)
    )
    return found if found is not None and found.kind in ("missing part", "doubled part") else None
