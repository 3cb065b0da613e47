"""What a parameter looks like when it is not the same in both runs before their first step.

It is loaded, not computed, so it may be another tensor altogether: of another layer, or of another expert. For this,
other tensors of its shape are read from the baseline, the likeliest first, and only where the difference is too large
to be anybody's rounding.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from mock_scheduler.comparison.explain.explanation import dims_of, layout_numbers
from mock_scheduler.comparison.explain.permutations import find_holders
from mock_scheduler.comparison.explain.residual import classify_residual
from mock_scheduler.comparison.findings import OtherStart
from mock_scheduler.comparison.measure.distance import is_bit_equal
from mock_scheduler.comparison.pairing.pairs import TensorPair, TracePair
from mock_scheduler.comparison.thresholds import FIRST_ELEMENTS, MOST_TENSORS_READ, OTHER_TENSOR
from mock_scheduler.support.numbers import natural_part
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import TraceReader

_NUMBER = re.compile(r"\d+")


def explain_initial(pair: TensorPair, traces: TracePair) -> OtherStart:
    """Explains an initial parameter with unequal values in the two runs.

    ``pair``: of kind ``initial``, finite.

    Raises:
        TraceError: A file is damaged.
    """
    key = pair.key
    if pair.baseline.dtype != pair.candidate.dtype or not pair.baseline.is_floating_point():
        return OtherStart()
    found = classify_residual(
        pair.baseline,
        pair.candidate,
        present=pair.present,
        layout=layout_numbers(traces.readers, key),
        dims=dims_of(pair),
        holders=find_holders(key, traces.readers[1]),
    )
    if found is not None:
        return OtherStart(residual=found)
    # Of a part of a tensor it cannot be said that it is another one.
    if pair.present is not None or pair.sums.figures.relative < OTHER_TENSOR:
        return OtherStart()
    return OtherStart(same_as=_find_equal(key, pair.candidate, traces.readers[0]))


def _find_equal(key: TraceKey, candidate: torch.Tensor, baseline: TraceReader) -> str | None:
    """Finds the name of another initial parameter of the baseline with these bits."""
    form = candidate.dtype, tuple(candidate.shape)
    others = [
        other
        for other in baseline.keys(key.step)
        if replace(other, name=key.name) == key and other != key and baseline.dtype_and_shape(other) == form
    ]
    # A tensor with the same name but for its numbers is of another layer or expert, the likeliest mistake.
    others.sort(key=lambda other: (_NUMBER.sub("", other.name) != _NUMBER.sub("", key.name), _natural(other.name)))
    for other in others[:MOST_TENSORS_READ]:
        values = baseline.merge(other).tensor
        # A few elements tell nearly all tensors apart, at a small part of the cost.
        few = (side.reshape(-1)[:FIRST_ELEMENTS] for side in (values, candidate))
        if is_bit_equal(*few) and is_bit_equal(values, candidate):
            return other.name
    return None


def _natural(name: str) -> list[tuple[int, str]]:
    """Splits a name so that its numbers are compared as numbers."""
    return [natural_part(part) for part in re.split(r"(\d+)", name)]
