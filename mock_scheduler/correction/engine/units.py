"""Sums, maxima and minima over the units of a level: tokens, turns and sequences, also where ranks share them.

Contract: a unit's sum is of its tokens in their order, so no batching and no padding changes a bit of it. The only
communication is an all-reduce over the given group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from mock_scheduler.correction.engine.states import FloatArray
from mock_scheduler.correction.engine.tokens import ResponseTokens
from mock_scheduler.errors import CorrectionError

Reduction = Literal["sum", "max", "min"]

#: The result for a run without values.
EMPTY = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}

_UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum}
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Runs:
    """R runs of consecutive tokens, one after another; ``lengths``: int64 ``[R]`` on the CPU.

    The result of a run depends on its own values alone, to the last bit, wherever it lies.
    """

    def __init__(self, lengths: torch.Tensor) -> None:
        self.lengths = lengths
        self.num_values = int(lengths.sum())
        counts = lengths.numpy()
        filled = counts > 0
        self._starts = (counts.cumsum() - counts)[filled]
        self._filled = None if filled.all() else filled

    def counts(self, device: torch.device) -> torch.Tensor:
        """Returns the lengths, float64 ``[R]``."""
        return self._counts if device.type == "cpu" else self._counts.to(device)

    @cached_property
    def _counts(self) -> torch.Tensor:
        return self.lengths.double()

    def reduce(self, values: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """Reduces the values of each run: float64 ``[R]`` on their device; 0, -inf or inf for an empty run.

        The sum of bool values is the number of True ones.
        """
        if values.is_cpu:
            return torch.from_numpy(self.reduce_to_arrays(values, (reduction,))[0])
        lengths = self.lengths.to(values.device)
        return torch.segment_reduce(values.double(), reduction, lengths=lengths, initial=EMPTY[reduction], unsafe=True)

    def reduce_to_arrays(self, values: torch.Tensor, reductions: Sequence[Reduction]) -> list[FloatArray]:
        """Reduces by several reductions, to arrays on the CPU."""
        if not values.is_cpu:
            return [self.reduce(values, reduction).cpu().numpy() for reduction in reductions]
        array = values.numpy()
        if array.dtype == np.bool_ and reductions == ("sum",):
            # A third of the time that converting them takes, and exact: no run has 2^31 tokens.
            reduced = [np.add.reduceat(array.view(np.uint8), self._starts, dtype=np.int32).astype(np.float64)]
        else:
            array = array.astype(np.float64, copy=False)
            reduced = [_UFUNCS[reduction].reduceat(array, self._starts) for reduction in reductions]
        if self._filled is None:
            return reduced
        return [self._fill(column, EMPTY[reduction]) for column, reduction in zip(reduced, reductions, strict=True)]

    def _fill(self, column: FloatArray, empty: float) -> FloatArray:
        assert self._filled is not None
        every = np.full(len(self._filled), empty)
        every[self._filled] = column
        return every

    def where_filled(self, values: torch.Tensor, empty: float) -> torch.Tensor:
        """Returns values ``[R]``, with ``empty`` for runs without a token."""
        if self._filled is None:
            return values
        return torch.where(torch.from_numpy(self._filled).to(values.device), values, empty)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Repeats each of values ``[R]`` as often as its run is long."""
        if values.is_cpu:
            return torch.from_numpy(np.repeat(values.numpy(), self.lengths.numpy()))
        return torch.repeat_interleave(values, self.lengths.to(values.device), output_size=self.num_values)


class Units:
    """The U units of one level: all turns, or all sequences.

    sequence: int64 ``[U]``, the sequence of each unit.
    has_unknown: bool ``[U]``, whether a token of the unit has no known ratio, so that its sums are not known either;
        ``None`` where all are known.
    runs: this rank's R runs of tokens, each of them a unit or a part of one.
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
        """Collective where a group is given.

        Args:
            runs: This rank's runs of tokens.
            index: int64 ``[R]``, the unit of each run; ``None`` where run i is unit i, a whole sequence.
            sequence: int64 ``[U]``.
            unknown: int64 ``[Q]``, the units of the Q tokens without a known ratio.
            num_sequences: S.
            group: Ranks that hold other tokens of the same units.
        """
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
        """Reduces values ``[M]`` over each unit: float64 ``[U]``. Collective where a group was given."""
        return self._of_units(self.runs.reduce(values, reduction), reduction)

    def counts(self) -> torch.Tensor:
        """The number of tokens of each unit, float64 ``[U]``. Collective where a group was given."""
        return self._of_units(self.runs.counts(self.sequence.device), "sum")

    def _of_units(self, runs: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        if self._index is not None:
            empty = runs.new_full((len(self.sequence),), EMPTY[reduction])
            runs = empty.index_copy(0, self._index.to(runs.device), runs)
        elif self._group is not None:
            # Runs keep their counts, and an all-reduce writes in place.
            runs = runs.clone()
        return self._exchange(runs, reduction)

    def _exchange(self, values: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        if self._group is not None:
            dist.all_reduce(values, op=_OPS[reduction], group=self._group)
        return values

    def of_runs(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the value of each run's unit, ``[R]`` of values ``[U]``."""
        return values if self._index is None else values[self._index.to(values.device)]

    def by_sequence(
        self, values: torch.Tensor, reduction: Reduction, *, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Reduces values that the tokens of a run share over each sequence.

        Args:
            values: ``[R]``.
            reduction: A sum counts a run's value once for each of its tokens.
            counts: float64 ``[R]``, the number of tokens to count instead; ``None`` counts all.

        Returns:
            float64 ``[S]``; 0, -inf or inf for a sequence without a token.
        """
        if reduction == "sum":
            values = values * (self.runs.counts(values.device) if counts is None else counts)
        if self._by_sequence is not None:
            return self._by_sequence.reduce(values, reduction)
        return self.runs.where_filled(values.double(), EMPTY[reduction])

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the value of every token's unit, ``[M]`` of values ``[U]``."""
        return self.runs.spread(self.of_runs(values))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leveled:
    """Values of this rank's runs of ``units``, ``[R]``, or of tokens, ``[M]``, where ``units`` is ``None``."""

    values: torch.Tensor
    units: Units | None

    def by_token(self) -> torch.Tensor:
        """Returns one value per token, ``[M]``."""
        return self.values if self.units is None else self.units.runs.spread(self.values)


def any_of(flags: Sequence[Leveled]) -> Leveled:
    """Whether at least one of these flags is True: per unit where all share their units, else per token."""
    units = flags[0].units
    is_shared = all(item.units is units for item in flags)
    values = [item.values if is_shared else item.by_token() for item in flags]
    result = values[0]
    for further in values[1:]:
        result = result | further
    return Leveled(values=result, units=units if is_shared else None)


def sequence_units(tokens: ResponseTokens, group: dist.ProcessGroup | None) -> Units:
    """Makes every sequence a unit. Collective where a group is given."""
    return Units(
        runs=Runs(tokens.lengths),
        index=None,
        sequence=torch.arange(tokens.num_sequences, device=tokens.log_ratio.device),
        unknown=tokens.unknown.sequence,
        num_sequences=tokens.num_sequences,
        group=group,
    )


def check_turns(tokens: ResponseTokens, group: dist.ProcessGroup | None) -> None:
    """Checks the turns of ``turn_ids``; communicates nothing.

    Raises:
        CorrectionError: A turn below 0, a turn whose tokens do not lie together, or a group without ``turn_ids``.
    """
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
    """Makes every turn a unit: the turns of ``turn_ids``, or else each unbroken run of response tokens.

    ``check_turns`` must have passed. Collective where a group is given.
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
