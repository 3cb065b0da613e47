"""Computes the direction of whole parameter updates in two runs: cosine and ratio of lengths, for each update.

Parameters without gradient move by rules of their own (``expert_bias``) and have no say: their steps do not follow from
the loss, and are often larger than all others together.
Contract: in float64, one tensor at a time and in chunks, so that memory is a few times the largest tensor as stored.
Sums over chunks and names are in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mock_scheduler.comparison.explain.expert_bias import find_without_gradient
from mock_scheduler.comparison.measure.large_tensors import split_chunks
from mock_scheduler.comparison.pairing.pairs import TracePair
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import MergedTensor

#: A critic's parameters are no policy.
_CRITIC = "critic."


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateDirection:
    """Holds one update of the policy in both runs.

    cosine: of the two changes of all parameters that have gradients, nan where either is 0. ratio: ‖candidate's‖ /
    ‖baseline's‖.
    """

    step: int
    update: int
    cosine: float
    ratio: float


@dataclass(slots=True)
class _Sums:
    products: float = 0.0
    baseline: float = 0.0
    candidate: float = 0.0
    num_tensors: int = 0

    def add(self, before: Sequence[MergedTensor], after: Sequence[MergedTensor]) -> None:
        flat = [item.tensor.reshape(-1) for item in (*before, *after)]
        # In chunks, since float64 copies of four whole tensors may not fit into memory.
        for start, stop in split_chunks(0, flat[0].numel()):
            olds_and_news = [tensor[start:stop].double() for tensor in flat]
            ours, theirs = (new - old for old, new in zip(olds_and_news[:2], olds_and_news[2:], strict=True))
            self.products += float(ours @ theirs)
            self.baseline += float(ours @ ours)
            self.candidate += float(theirs @ theirs)
        self.num_tensors += 1

    def direction(self, step: int, update: int) -> UpdateDirection:
        # The root of the product, and not the product of roots: of equal changes it is exact, and the cosine 1.
        length = math.sqrt(self.baseline * self.candidate)
        is_moved = length > 0 and math.isfinite(length)
        cosine = max(-1.0, min(1.0, self.products / length)) if is_moved else math.nan
        ratio = math.sqrt(self.candidate / self.baseline) if self.baseline > 0 else math.nan
        return UpdateDirection(step=step, update=update, cosine=cosine, ratio=ratio)


@dataclass(slots=True)
class UpdateDirections:
    """Collects the updates of all steps. ``left_out``: names of parameters without a whole trace in both runs."""

    found: list[UpdateDirection] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)

    def add_step(self, traces: TracePair, step: int) -> None:
        """Adds all shared updates of a step. Raises ``TraceError`` where a tensor cannot be read."""
        ours, theirs = (reader.keys(step) for reader in traces.readers)
        by_rule = find_without_gradient(ours) & find_without_gradient(theirs)
        ours, theirs = (frozenset(key for key in keys if key.name not in by_rule) for keys in (ours, theirs))
        updated = sorted(
            (key for key in ours & theirs if _is_policy(key, "parameter")), key=lambda key: (key.name, key.update)
        )
        sums = {key.update: _Sums() for key in updated}
        self.left_out |= {key.name for key in ours ^ theirs if _is_policy(key, "parameter")}
        for name in dict.fromkeys(key.name for key in updated):
            self._add_name(traces, step, name, [key for key in updated if key.name == name], sums)
        self.found += [sums[update].direction(step, update) for update in sorted(sums) if sums[update].num_tensors]

    def _add_name(
        self, traces: TracePair, step: int, name: str, keys: Sequence[TraceKey], sums: dict[int, _Sums]
    ) -> None:
        initial = TraceKey(step=step, update=0, kind="initial", name=name)
        if not all(reader.has(initial) for reader in traces.readers):
            self.left_out.add(name)
            return
        before, last = traces.merge(initial), -1
        for key in keys:
            after = traces.merge(key)
            # Elements nobody holds are 0 here; a change of them would be no change of the training.
            is_whole = all(item.present is None for item in (*before, *after))
            if key.update != last + 1 or not is_whole or len({item.tensor.shape for item in (*before, *after)}) > 1:
                self.left_out.add(name)
                return
            sums[key.update].add(before, after)
            before, last = after, key.update


def _is_policy(key: TraceKey, kind: str) -> bool:
    return key.kind == kind and not key.name.startswith(_CRITIC)
