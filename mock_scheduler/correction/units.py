"""Sums, maxima and minima over the units of a level: tokens, turns and sequences, also where ranks share them.

Contract: a unit's sum is of its tokens in their order, so no batching and no padding changes a bit of it. The only
communication is an all-reduce over the group that is given.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from mock_scheduler.correction.inputs import ResponseTokens
from mock_scheduler.errors import CorrectionError

Reduction = Literal["sum", "max", "min"]

_EMPTY = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}
_UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum}
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def reduce_runs(values: torch.Tensor, lengths: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """One float64 value per run of ``values`` ``[sum(lengths)]``; 0, -inf or inf for an empty run.

    lengths: int64 ``[U]`` on the CPU. On the device of ``values``.
    """
    values = values.double()
    if not values.is_cpu:
        return torch.segment_reduce(
            values, reduction, lengths=lengths.to(values.device), initial=_EMPTY[reduction], unsafe=True
        )
    counts = lengths.numpy()
    result = np.full(len(counts), _EMPTY[reduction])
    filled = counts > 0
    if filled.any():
        starts = (counts.cumsum() - counts)[filled]
        result[filled] = _UFUNCS[reduction].reduceat(values.numpy(), starts)
    return torch.from_numpy(result)


class Units:
    """The units of one level. ``sequence``: int64 ``[U]``, that each unit is in; ``has_unknown``: bool ``[U]``, whether
    one of its tokens is not known, and its sums therefore neither; ``None`` where all are known.

    lengths: int64 ``[R]`` on the CPU, of this rank's runs of tokens; index: int64 ``[R]``, the unit that each run is
    (a part) of; ``None`` where run i is unit i. group: ranks that hold other tokens of the same units.
    """

    def __init__(
        self,
        *,
        lengths: torch.Tensor,
        index: torch.Tensor | None,
        sequence: torch.Tensor,
        unknown: torch.Tensor,
        num_tokens: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.sequence = sequence
        self._lengths = lengths
        self._index = index
        self._num_tokens = num_tokens
        self._group = group if group is not None and group.size() > 1 else None
        self.has_unknown: torch.Tensor | None = None
        if len(unknown) or self._group is not None:
            counts = torch.bincount(unknown, minlength=len(sequence)).double()
            self.has_unknown = self._exchange(counts, "sum") > 0

    def reduce(self, values: torch.Tensor, reduction: Reduction = "sum") -> torch.Tensor:
        """float64 ``[U]`` of values ``[M]``. Collective where a group was given."""
        runs = reduce_runs(values, self._lengths, reduction)
        if self._index is not None:
            empty = runs.new_full((len(self.sequence),), _EMPTY[reduction])
            runs = empty.index_copy(0, self._index.to(runs.device), runs)
        return self._exchange(runs, reduction)

    def _exchange(self, values: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        if self._group is not None:
            dist.all_reduce(values, op=_OPS[reduction], group=self._group)
        return values

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """``[M]``: the value of every token's unit."""
        runs = values if self._index is None else values[self._index.to(values.device)]
        return torch.repeat_interleave(runs, self._lengths.to(values.device), output_size=self._num_tokens)


def sequence_units(tokens: ResponseTokens, group: dist.ProcessGroup | None) -> Units:
    """Every sequence is a unit."""
    return Units(
        lengths=tokens.lengths,
        index=None,
        sequence=torch.arange(tokens.num_sequences, device=tokens.log_ratio.device),
        unknown=tokens.unknown.sequence,
        num_tokens=len(tokens.log_ratio),
        group=group,
    )


def turn_units(tokens: ResponseTokens, group: dist.ProcessGroup | None) -> Units:
    """Every turn is a unit: those of ``turn_ids``, or else each unbroken run of response tokens.

    Raises ``CorrectionError`` for a group without ``turn_ids``, and for turns whose tokens do not lie together.
    """
    assert tokens.turns is not None
    turns, sequence = tokens.turns.long(), tokens.sequence()
    lost_turn = tokens.unknown.turn
    assert lost_turn is not None
    is_shared = group is not None and group.size() > 1
    if not tokens.has_turn_ids and is_shared:
        raise CorrectionError(
            "rollout correction: rules of level segment need turn_ids where ranks share sequences, since no rank sees "
            "all of them"
        )
    both = torch.cat((turns, lost_turn.long()))
    if len(both) and int(both.min()) < 0:
        raise CorrectionError(f"rollout correction: turn_ids of response tokens are 0 and above; one is {both.min()}")
    most = both.max().reshape(1) + 1 if len(both) else both.new_ones(1)
    if is_shared:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    num_turns = int(most)
    if tokens.has_turn_ids:
        ids, lost = sequence * num_turns + turns, tokens.unknown.sequence * num_turns + lost_turn.long()
        every = torch.arange(tokens.num_sequences * num_turns, device=ids.device) // num_turns
    else:
        ids, lost = turns, lost_turn
        every = ids.new_zeros(num_turns)
        every[lost], every[ids] = tokens.unknown.sequence, sequence
    runs, lengths = torch.unique_consecutive(ids, return_counts=True)
    if len(runs.unique()) < len(runs):
        raise CorrectionError("rollout correction: turn_ids do not keep the tokens of each turn together")
    return Units(
        lengths=lengths.cpu(),
        index=runs,
        sequence=every,
        unknown=lost,
        num_tokens=len(sequence),
        group=group,
    )
