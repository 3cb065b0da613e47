"""Cuts a batch into blocks of whole sequences that fit a processor's cache, and corrects one block.

Contract: a block's result does not depend on the thread that computes it, and no result depends on the other sequences
of the block; results come in the blocks' order. The only communication is over the given group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from mock_scheduler.correction.config.rules import CorrectionSpec, Level
from mock_scheduler.correction.engine.inputs import CorrectionInputs, CorrectionResult
from mock_scheduler.correction.engine.measures import MeasuredRule, MeasuredWeights, measure_rule, normalise, weigh
from mock_scheduler.correction.engine.sequence_sums import collect_states
from mock_scheduler.correction.engine.tokens import read_tokens
from mock_scheduler.correction.engine.units import Leveled, Units, any_of, check_turns, sequence_units, turn_units
from mock_scheduler.support.threads import without_inner_threads

#: Measured fastest of 8 Ki to 1 Mi: for smaller blocks the calls take longer than the computation.
BLOCK_TOKENS = 1 << 17

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """Holds some sequences of a batch; ``place``: their rows, or their packed tokens, in the batch."""

    inputs: CorrectionInputs
    place: slice


def split_inputs(inputs: CorrectionInputs) -> list[Block]:
    """Cuts a batch into blocks of about ``BLOCK_TOKENS`` tokens, or of one longer sequence; at least one block.

    On an accelerator there is one block: large tensors are fast there.
    """
    if not inputs.response_mask.is_cpu:
        return [whole_batch(inputs)]
    if inputs.cu_seqlens is None:
        return list(_split_rows(inputs))
    return list(_split_packed(inputs, inputs.cu_seqlens.long().cpu()))


def whole_batch(inputs: CorrectionInputs) -> Block:
    """Makes the whole batch one block."""
    return Block(inputs=inputs, place=slice(0, len(inputs.response_mask)))


def _split_rows(inputs: CorrectionInputs) -> Iterator[Block]:
    num_rows, width = inputs.response_mask.shape
    step = max(BLOCK_TOKENS // max(width, 1), 1)
    for start in range(0, max(num_rows, 1), step):
        place = slice(start, min(start + step, num_rows))
        yield Block(inputs=_part(inputs, place, None), place=place)


def _split_packed(inputs: CorrectionInputs, offsets: torch.Tensor) -> Iterator[Block]:
    limits = offsets.tolist()
    first, last = 0, len(limits) - 1
    while True:
        end = min(first + 1, last)
        while end < last and limits[end + 1] - limits[first] <= BLOCK_TOKENS:
            end += 1
        place = slice(limits[first], limits[end])
        yield Block(inputs=_part(inputs, place, offsets[first : end + 1] - offsets[first]), place=place)
        first = end
        if first >= last:
            return


def _part(inputs: CorrectionInputs, place: slice, offsets: torch.Tensor | None) -> CorrectionInputs:
    tensors = {name: tensor[place] for name, tensor in inputs.tensors().items()}
    return CorrectionInputs(**tensors, cu_seqlens=offsets)


def map_blocks(compute: Callable[[Block], _Result], blocks: Sequence[Block]) -> Iterator[_Result]:
    """Calls ``compute`` on each block, in order, on all of torch's threads, while torch uses one."""
    num_threads = min(torch.get_num_threads(), len(blocks))
    if num_threads < 2 or any(block.inputs.response_mask.numel() > BLOCK_TOKENS for block in blocks):
        yield from map(compute, blocks)
        return
    with without_inner_threads(), ThreadPoolExecutor(num_threads - 1) as pool:
        # This thread takes its share.
        given = {place: pool.submit(compute, block) for place, block in enumerate(blocks) if place % num_threads}
        for place, block in enumerate(blocks):
            yield given.pop(place).result() if place in given else compute(block)


class BlockCorrection:
    """The correction of one block; each part is computed once, when it is first asked for.

    Ranks with shared sequences must ask for the same parts in the same order.
    """

    def __init__(
        self,
        inputs: CorrectionInputs,
        *,
        spec: CorrectionSpec,
        group: dist.ProcessGroup | None,
        batch: CorrectionInputs,
    ) -> None:
        """Reads the tokens; communicates nothing.

        Args:
            inputs: The block, a part of ``batch``.
            spec: The rules.
            group: Ranks with other tokens of the same sequences.
            batch: The whole batch, for messages.

        Raises:
            CorrectionError: Values without a correction, as ``read_tokens`` and ``check_turns`` refuse them.
        """
        self._inputs = inputs
        self._spec = spec
        self._group = group
        self.tokens = read_tokens(inputs, spec.nan_policy, needs_turns=spec.needs_turns, batch=batch)
        if spec.needs_turns:
            check_turns(self.tokens, group)

    @cached_property
    def sequences(self) -> Units:
        """Returns the units of all levels but token and segment."""
        return sequence_units(self.tokens, self._group)

    @cached_property
    def _turns(self) -> Units:
        return turn_units(self.tokens, self._group)

    @cached_property
    def _measured(self) -> dict[int, MeasuredRule]:
        """Measures by the rule's place; ``truncate`` and ``clip`` need none."""
        rules = enumerate(self._spec.rules)
        return {
            place: measure_rule(rule, self.tokens, self._units(rule.level), sequences=self.sequences)
            for place, rule in rules
            if rule.action not in ("truncate", "clip")
        }

    def _units(self, level: Level) -> Units | None:
        """The units of a level; ``None``: every token is one."""
        if level == "token":
            return None
        return self._turns if level == "segment" else self.sequences

    @cached_property
    def kept(self) -> Leveled:
        """Bool, True unless a rule rejects; one value per sequence where that says everything."""
        rejections = [item.rejected for item in self._measured.values() if item.rejected is not None]
        # Rules judge the raw log ratios, so no rule sees the work of another, and their order does not matter.
        rejected = any_of(rejections) if rejections else None
        if rejected is None or not bool(rejected.values.any()):
            return Leveled(values=torch.ones_like(self.sequences.sequence, dtype=torch.bool), units=self.sequences)
        return Leveled(values=~rejected.values, units=rejected.units)

    # Log-probabilities far apart give infinities, and no warning.
    @np.errstate(all="ignore")
    def result(self, factor: float | None) -> CorrectionResult:
        """Makes the block's weights, mask and states; ``factor``: the divisor of weights, ``None`` for none."""
        tokens, kept = self.tokens, self.kept.by_token()
        weights = None if self.weights is None else normalise(self.weights, factor)
        applied = None
        if weights is not None:
            # Rejected tokens keep their weights; the loss leaves them out by the mask.
            applied = Leveled(values=weights.applied.to(tokens.dtype), units=weights.units).by_token()
        mask = self._inputs.response_mask.detach()
        if tokens.is_known is not None or not bool(self.kept.values.all()):
            mask = torch.where(tokens.spread(kept), mask, torch.zeros_like(mask))
        return CorrectionResult(
            weights=None if applied is None else tokens.spread(applied),
            mask=mask,
            kept=tokens.with_unknown(kept),
            weights_by_token=None if applied is None else tokens.with_unknown(applied),
            states=collect_states(tokens, self._spec, self._measured, weights, self.kept, sequences=self.sequences),
        )

    @cached_property
    def weights(self) -> MeasuredWeights | None:
        """Returns importance weights as the rules leave them, not yet divided by their mean."""
        if self._spec.weight is None:
            return None
        return weigh(self.tokens, self._units(self._spec.weight), self._spec, self._measured)

    @np.errstate(all="ignore")
    def weight_sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns addends of numerator and denominator of the mean weight, float64 ``[S]`` each.

        Collective where a group was given.
        """
        assert self.weights is not None
        bounded = Leveled(values=self.weights.bounded, units=self.weights.units).by_token()
        units = self._units(self._spec.weight) if self._spec.weight is not None else None
        # A unit with an unknown ratio has the weight 0 for want of a better, and is in no mean.
        known = torch.ones_like(bounded)
        if units is not None and units.has_unknown is not None:
            known = (~units.spread(units.has_unknown)).double()
        counts, sums = self.sequences.reduce(known), self.sequences.reduce(bounded * known)
        if self._spec.weight == "token":
            return sums, counts
        return sums / counts.clamp(min=1.0), (counts > 0).double()
