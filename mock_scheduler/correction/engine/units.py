"""Sums, maxima and minima over the units of a level: tokens, turns and sequences, also where ranks share them.

Contract: a unit's sum is of its tokens in their order, so no batching and no padding changes a bit of it. The only
communication is an all-reduce over the group that is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mock_scheduler.correction.engine.inputs import ResponseTokens
from mock_scheduler.correction.engine.runs import EMPTY, Reduction, Runs
from mock_scheduler.errors import CorrectionError

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Units:
    """The units of one level. ``sequence``: int64 ``[U]``, that each unit is in; ``has_unknown``: bool ``[U]``, whether
    one of its tokens is not known, and its sums therefore neither; ``None`` where all are known.

    runs: this rank's R runs of tokens, each (a part of) one unit; index: int64 ``[R]``, which; ``None`` where run i is
    unit i, a whole sequence. group: ranks that hold other tokens of the same units.
    """

    def __init__(
        self,
        *,
        runs: Runs,
        index: torch.Tensor | None,
        sequence: torch.Tensor,
        unknown: torch.Tensor,
        num_sequences: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.sequence = sequence
        self.runs = runs
        self._index = index
        self._by_sequence: Runs | None = None
        if index is not None:
            counts = torch.bincount(sequence[index], minlength=num_sequences)
            self._by_sequence = Runs(counts.cpu())
        self._group = group if group is not None and group.size() > 1 else None
        self.has_unknown: torch.Tensor | None = None
        if len(unknown) or self._group is not None:
            lost = torch.bincount(unknown, minlength=len(sequence)).double()
            self.has_unknown = self._exchange(lost, "sum") > 0

    def reduce(self, values: torch.Tensor, reduction: Reduction = "sum") -> torch.Tensor:
        """float64 ``[U]`` of values ``[M]``. Collective where a group was given."""
        return self._of_units(self.runs.reduce(values, reduction), reduction)

    def counts(self) -> torch.Tensor:
        """float64 ``[U]``: tokens. Collective where a group was given."""
        return self._of_units(self.runs.counts(self.sequence.device), "sum")

    def _of_units(self, runs: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        if self._index is not None:
            empty = runs.new_full((len(self.sequence),), EMPTY[reduction])
            runs = empty.index_copy(0, self._index.to(runs.device), runs)
        elif self._group is not None:
            # Counts are kept: an all-reduce in place must not write to them.
            runs = runs.clone()
        return self._exchange(runs, reduction)

    def _exchange(self, values: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        if self._group is not None:
            dist.all_reduce(values, op=_OPS[reduction], group=self._group)
        return values

    def of_runs(self, values: torch.Tensor) -> torch.Tensor:
        """``[R]`` of values ``[U]``."""
        return values if self._index is None else values[self._index.to(values.device)]

    def by_sequence(
        self, values: torch.Tensor, reduction: Reduction, *, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float64 ``[S]`` of values ``[R]``, each of all tokens of a run; 0, -inf or inf where there is no token.

        counts: float64 ``[R]``, how many tokens of each run to sum the value of; all where ``None``.
        """
        if reduction == "sum":
            values = values * (self.runs.counts(values.device) if counts is None else counts)
        if self._by_sequence is not None:
            return self._by_sequence.reduce(values, reduction)
        return self.runs.where_filled(values.double(), EMPTY[reduction])

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """``[M]`` of values ``[U]``: that of every token's unit."""
        return self.runs.spread(self.of_runs(values))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leveled:
    """Values of this rank's runs ``[R]`` of the units, or ``[M]`` of tokens where ``units`` is ``None``."""

    values: torch.Tensor
    units: Units | None

    def by_token(self) -> torch.Tensor:
        """``[M]``."""
        return self.values if self.units is None else self.units.runs.spread(self.values)


def any_of(flags: Sequence[Leveled]) -> Leveled:
    """Whether one of these, at least one, is True: per unit where all are of the same units, else per token."""
    units = flags[0].units
    is_shared = all(item.units is units for item in flags)
    values = [item.values if is_shared else item.by_token() for item in flags]
    result = values[0]
    for further in values[1:]:
        result = result | further
    return Leveled(values=result, units=units if is_shared else None)


def sequence_units(tokens: ResponseTokens, group: dist.ProcessGroup | None) -> Units:
    """Every sequence is a unit."""
    return Units(
        runs=Runs(tokens.lengths),
        index=None,
        sequence=torch.arange(tokens.num_sequences, device=tokens.log_ratio.device),
        unknown=tokens.unknown.sequence,
        num_sequences=tokens.num_sequences,
        group=group,
    )


def check_turns(tokens: ResponseTokens, group: dist.ProcessGroup | None) -> None:
    """Raise ``CorrectionError`` for turns below 0, for turns whose tokens do not lie together, and for a group without
    ``turn_ids``. Communicates nothing."""
    if not tokens.has_turn_ids:
        if group is not None and group.size() > 1:
            raise CorrectionError(
                "rollout correction: rules of level segment need turn_ids where ranks share sequences, since no rank "
                "sees all of them"
            )
        return
    assert tokens.turns is not None
    assert tokens.unknown.turn is not None
    turns = tokens.turns.long()
    both = torch.cat((turns, tokens.unknown.turn.long()))
    if not len(both):
        return
    if int(both.min()) < 0:
        raise CorrectionError(f"rollout correction: turn_ids of response tokens are 0 and above; one is {both.min()}")
    runs = torch.unique_consecutive(tokens.sequence() * (int(both.max()) + 1) + turns)
    if len(runs.unique()) < len(runs):
        raise CorrectionError("rollout correction: turn_ids do not keep the tokens of each turn together")


def turn_units(tokens: ResponseTokens, group: dist.ProcessGroup | None) -> Units:
    """Every turn is a unit: those of ``turn_ids``, or else each unbroken run of response tokens.

    The turns must be such as ``check_turns`` lets pass. Collective where a group is given.
    """
    assert tokens.turns is not None
    turns, sequence = tokens.turns.long(), tokens.sequence()
    lost_turn = tokens.unknown.turn
    assert lost_turn is not None
    both = torch.cat((turns, lost_turn.long()))
    most = both.max().reshape(1) + 1 if len(both) else both.new_ones(1)
    if group is not None and group.size() > 1:
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
    return Units(
        runs=Runs(lengths.cpu()),
        index=runs,
        sequence=every,
        unknown=lost,
        num_sequences=tokens.num_sequences,
        group=group,
    )
