"""What the tensors of one step show of values that were rounded to a narrower type.

Moments and updated parameters are state in a wide type in every precision, so that fewer bits than the type has are a
fault by themselves, whatever the noise. Gradients are as coarse as the sums that they are, which depends on a model's
type, its kernels and its micro-batches: of them it is only said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from mock_scheduler.comparison.explain.narrowing import find_narrowing, find_sums
from mock_scheduler.comparison.findings import FewerBits, Finding, NarrowedState, finding
from mock_scheduler.comparison.measure.distance import is_bit_equal
from mock_scheduler.comparison.measure.large_tensors import split_blocks
from mock_scheduler.comparison.pairing.order import order_keys
from mock_scheduler.comparison.pairing.pairs import TensorPair
from mock_scheduler.comparison.thresholds import FEWER_BITS, MOST_OF_IT, NARROWED_GRADIENT, NARROWED_UPDATE
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.whole import Values, WholeTensor

_Sides = tuple[torch.Tensor, torch.Tensor]


class NarrowedValues:
    """Collects what was narrowed, tensor by tensor; ``has_sums``: gradients are looked at, too."""

    def __init__(self, *, has_sums: bool) -> None:
        self._has_sums = has_sums
        self._state: dict[TraceKey, tuple[int, int]] = {}
        self._samples: dict[tuple[int, int], dict[str, _Sides]] = {}

    def watch(self, pairs: Iterable[TensorPair]) -> Iterator[TensorPair]:
        """Hands on the state of one name, in its order."""
        before: TensorPair | None = None
        for pair in pairs:
            if pair.key.kind == "gradient":
                if self._has_sums:
                    self._take_sample(pair)
            elif pair.key.kind in ("initial", "parameter"):
                # A parameter that no update moved has the bits that it was loaded with.
                moved = before is not None and not is_bit_equal(before.values[1], pair.values[1])
                if pair.key.kind == "parameter" and moved:
                    self.add(pair)
                before = pair
            yield pair

    def add(self, pair: TensorPair) -> None:
        """Looks at one tensor of the state."""
        # Equal bits are narrowed in neither, and of absent elements, which are 0, every low bit is 0.
        if pair.is_equal or pair.present is not None:
            return
        found = find_narrowing(*pair.values)
        if found is not None:
            self._state[pair.key] = found

    def findings(self) -> list[Finding]:
        """Returns one for all tensors of a kind and update: at the first of them."""
        groups: dict[tuple[int, TraceKind], list[TraceKey]] = {}
        for key in order_keys(self._state):
            groups.setdefault((key.update, key.kind), []).append(key)
        found = []
        for keys in groups.values():
            bits, mine = self._state[keys[0]]
            fact = NarrowedState(num_bits=bits, baseline_bits=mine, num_tensors=len(keys))
            found.append(finding(keys[0], fact))
        return found

    def note(self) -> FewerBits | None:
        """The first update whose gradients are sums of coarser numbers than the baseline's, or of fewer."""
        for (step, update), samples in sorted(self._samples.items()):
            # An equal share of each, so that large ones do not outweigh all others: all of it where only one differs.
            share = max(NARROWED_UPDATE // len(samples), NARROWED_GRADIENT)
            mine, other = (
                _thin(torch.cat([_thin(sides[side], share) for sides in samples.values()]), NARROWED_UPDATE)
                for side in (0, 1)
            )
            their_sums = find_sums(other)
            if their_sums is None or their_sums.short < MOST_OF_IT:
                continue
            our_sums = find_sums(mine, divisor=their_sums.divisor)
            if our_sums is not None and our_sums.bits - their_sums.bits >= FEWER_BITS:
                return FewerBits(
                    step=step,
                    update=update,
                    only=next(iter(samples)) if len(samples) == 1 else "",
                    divisor=their_sums.divisor,
                    num_bits=their_sums.bits,
                    baseline_bits=our_sums.bits,
                )
        return None

    def _take_sample(self, pair: TensorPair) -> None:
        if pair.is_equal or pair.present is not None or set(pair.dtypes) != {torch.float32}:
            return
        mine, other = (_thin(side, NARROWED_UPDATE) for side in pair.values)
        sides = mine, other
        self._samples.setdefault((pair.key.step, pair.key.update), {})[pair.key.name] = sides


def _thin(tensor: Values, most: int) -> torch.Tensor:
    """Keeps evenly spaced elements: each divisor is tried on all of them, and a large model has many gradients."""
    values = WholeTensor.of(tensor)
    stride = max(-(-values.numel() // most), 1)
    # Columns are mostly even in number, so that an even stride would never see half of them.
    stride += stride > 1 and stride % 2 == 0
    return torch.cat([values.read(*block)[-block[0] % stride :: stride] for block in split_blocks(values.numel())])
