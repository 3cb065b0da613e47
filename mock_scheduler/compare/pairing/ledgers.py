"""Sequences of calls, compared one by one: between the ranks of a group in one run, and between two runs.

Ranks of one group must issue the same collectives in the same order, or a run hangs or sums what does not belong
together. Two runs in one layout must issue the same calls on every rank; in different layouts they may not.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Protocol

from mock_scheduler.compare.pairing.selection import Selection
from mock_scheduler.compare.tensors import LedgerComparison
from mock_scheduler.config.trace import LEDGER_KINDS, LedgerKind
from mock_scheduler.trace.entries import LedgerCall, RankPlace, StepFooter


class LedgerSource(Protocol):
    """A trace that has ledgers, whatever else is in it."""

    def footers(self, step: int) -> tuple[tuple[RankPlace, StepFooter], ...]:
        """What each rank says of a step, by global rank."""


_NO_CALLS: tuple[LedgerCall, ...] = ()


def compare_ledgers(
    readers: tuple[LedgerSource, LedgerSource], step: int, selection: Selection, notes: MutableMapping[str, None]
) -> list[LedgerComparison]:
    """The ledgers of one step that both runs have, rank by rank; what cannot be compared goes to the keys of ``notes``.

    ``random`` and ``collective`` are compared where both runs have the same ranks at the same coordinates.
    """
    found = []
    for kind in LEDGER_KINDS:
        if not selection.has_kind(kind):
            continue
        ours, theirs = (_calls_by_rank(reader, step, kind) for reader in readers)
        if not ours and not theirs:
            continue
        if not ours or not theirs:
            side = "baseline" if ours else "candidate"
            notes[f"the ledger of {kind} calls was not compared: only the {side} traced it"] = None
        elif [_where(place) for place, _ in ours] != [_where(place) for place, _ in theirs]:
            notes[f"the ledger of {kind} calls was not compared: the two runs have different layouts"] = None
        else:
            found.append(_compare(kind, step, ours, theirs))
    return found


def check_groups(reader: LedgerSource, step: int) -> LedgerComparison | None:
    """Whether the ranks of each group issued the same collectives in the same order; ``None`` without such a ledger.

    Point-to-point calls are not collective and are left out: each end has its own.
    """
    by_rank = _calls_by_rank(reader, step, "collective")
    if not by_rank:
        return None
    calls = {place.global_rank: [call for call in calls if not _is_one_sided(call)] for place, calls in by_rank}
    places = {place.global_rank: place for place, _ in by_rank}
    groups = sorted({call.group for own in calls.values() for call in own if len(call.group) > 1})
    num_equal = 0
    for group in groups:
        members = [rank for rank in group if rank in calls]
        sequences = [[call for call in calls[rank] if call.group == group] for rank in members]
        for rank, sequence in zip(members[1:], sequences[1:], strict=True):
            position = _first_difference(sequences[0], sequence)
            num_equal += position if position is not None else len(sequence)
            if position is not None:
                names = (places[members[0]].describe(), places[rank].describe())
                text = _describe(f"group {list(group)}, collective", position, names, (sequences[0], sequence))
                return LedgerComparison(
                    kind="collective",
                    step=step,
                    num_ranks=len(by_rank),
                    num_calls=num_equal,
                    difference=f"step {step}: {text}",
                )
    return LedgerComparison(kind="collective", step=step, num_ranks=len(by_rank), num_calls=num_equal, difference=None)


def _compare(kind: LedgerKind, step: int, ours: _ByRank, theirs: _ByRank) -> LedgerComparison:
    num_calls, difference = 0, None
    for (place, mine), (_, other) in zip(ours, theirs, strict=True):
        position = _first_difference(mine, other)
        num_calls += len(mine) if position is None else position
        if position is not None and difference is None:
            text = _describe(f"{kind} call", position, ("the baseline", "the candidate"), (mine, other))
            difference = f"step {step}, {place.describe()}: {text}"
    return LedgerComparison(kind=kind, step=step, num_ranks=len(ours), num_calls=num_calls, difference=difference)


def _first_difference(mine: Sequence[LedgerCall], other: Sequence[LedgerCall]) -> int | None:
    pairs = zip(mine, other, strict=False)
    position = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
    if position is None and len(mine) != len(other):
        return min(len(mine), len(other))
    return position


def _describe(
    what: str, position: int, names: tuple[str, str], calls: tuple[Sequence[LedgerCall], Sequence[LedgerCall]]
) -> str:
    """``collective 3 is all_reduce of 64 float32 over ranks 0, 1 in …, and absent (2 calls in all) in …``."""
    sides = [_describe_call(own[position]) if position < len(own) else f"absent ({len(own)} in all)" for own in calls]
    return f"{what} {position} is {sides[0]} in {names[0]}, and {sides[1]} in {names[1]}"


def _describe_call(call: LedgerCall) -> str:
    group = f" over ranks {', '.join(map(str, call.group))}" if call.group else ""
    return f"{call.operation} of {call.num_elements:,} {call.dtype}{group}"


def _is_one_sided(call: LedgerCall) -> bool:
    return call.operation in {"send", "recv"}


def _where(place: RankPlace) -> tuple[int, tuple[tuple[str, int], ...]]:
    return place.global_rank, tuple(sorted(place.coordinates.items()))


_ByRank = list[tuple[RankPlace, Sequence[LedgerCall]]]


def _calls_by_rank(reader: LedgerSource, step: int, kind: LedgerKind) -> _ByRank:
    """The calls of each rank that has such a ledger; empty where none has."""
    return [
        (place, footer.ledgers.get(kind, _NO_CALLS)) for place, footer in reader.footers(step) if kind in footer.ledgers
    ]
