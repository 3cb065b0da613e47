"""Compares sequences of calls one by one: between the ranks of a group in one run, and between two runs.

Ranks of one group must issue the same collectives in the same order, or a run hangs or adds values of different
tensors. Two runs in one layout with one configuration must issue the same calls on every rank; others may not.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from mock_scheduler.comparison.findings import LedgerNotCompared, Note
from mock_scheduler.comparison.pairing.selection import Selection
from mock_scheduler.comparison.pairing.sources import LedgerSource
from mock_scheduler.comparison.tensors import LedgerComparison, LedgerDifference
from mock_scheduler.config.instruments import LEDGER_KINDS, LedgerKind
from mock_scheduler.trace.begun_calls import BegunStep
from mock_scheduler.trace.entries import LedgerCall, RankPlace

_NO_CALLS: tuple[LedgerCall, ...] = ()


def compare_ledgers(
    readers: tuple[LedgerSource, LedgerSource], step: int, selection: Selection, notes: MutableMapping[Note, None]
) -> list[LedgerComparison]:
    """Compares the ledgers of one step in both runs, rank by rank; ledgers left out go to the keys of ``notes``.

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
            notes[LedgerNotCompared(kind=kind, only="baseline" if ours else "candidate")] = None
        # Another layout makes other calls by design: they are no difference of the training.
        elif [_where(place) for place, _ in ours] != [_where(place) for place, _ in theirs]:
            notes[LedgerNotCompared(kind=kind, only=None)] = None
        # So do packed rows, recomputed layers and another optimizer's shards; draws are judged all the same.
        elif kind == "collective" and selection.has_other_calls:
            notes[LedgerNotCompared(kind=kind, only=None, has_other_settings=True)] = None
        else:
            found.append(_compare(kind, step, ours, theirs))
    return found


def check_groups(reader: LedgerSource, step: int) -> LedgerComparison | None:
    """Checks whether the ranks of each group issued the same collectives in order; ``None`` without such a ledger."""
    by_rank = _calls_by_rank(reader, step, "collective")
    if not by_rank:
        return None
    # Each end of a point-to-point call has its own, so two ranks of a group differ in them.
    calls = {place.global_rank: [call for call in calls if not _is_one_sided(call)] for place, calls in by_rank}
    places = {place.global_rank: place for place, _ in by_rank}
    groups = sorted({call.group for own in calls.values() for call in own if len(call.group) > 1})
    num_equal = 0
    for group in groups:
        # A rank that wrote no trace cannot be compared.
        members = [rank for rank in group if rank in calls]
        sequences = [[call for call in calls[rank] if call.group == group] for rank in members]
        # All against the first: agreement is transitive.
        for rank, sequence in zip(members[1:], sequences[1:], strict=True):
            position = _first_difference(sequences[0], sequence)
            num_equal += position if position is not None else len(sequence)
            if position is not None:
                whose = (places[members[0]], places[rank])
                return LedgerComparison(
                    kind="collective",
                    step=step,
                    num_ranks=len(by_rank),
                    num_calls=num_equal,
                    difference=_difference_at(position, (sequences[0], sequence), whose, group=tuple(group)),
                )
    return LedgerComparison(kind="collective", step=step, num_ranks=len(by_rank), num_calls=num_equal, difference=None)


def find_broken_group(begun: BegunStep) -> LedgerComparison | None:
    """Finds where the ranks of a group did not issue the same collectives, in a step that none of them ended.

    A call that only some have begun is a difference where no two calls are: the others may have ended before. Of
    several, the one that a rank came to first.
    """
    both_sided = {rank: [call for call in own if not _is_one_sided(call)] for rank, own in begun.calls.items()}
    found: list[tuple[bool, int, LedgerDifference]] = []
    for group in sorted({call.group for own in both_sided.values() for call in own}):
        members = [rank for rank in group if rank in both_sided]
        sequences = [[call for call in both_sided[rank] if call.group == group] for rank in members]
        for rank, sequence in zip(members[1:], sequences[1:], strict=True):
            position = _first_difference(sequences[0], sequence)
            if position is None:
                continue
            places = tuple(RankPlace(global_rank=number, coordinates={}) for number in (members[0], rank))
            difference = _difference_at(position, (sequences[0], sequence), places, group=tuple(group))
            longer = members[0] if difference.calls[0] is not None else rank
            found.append((None in difference.calls, _place_of(both_sided[longer], group, position), difference))
    if not found:
        return None
    first = min(found, key=lambda item: item[:2])[2]
    return LedgerComparison(
        kind="collective", step=begun.step, num_ranks=len(begun.calls), num_calls=first.position, difference=first
    )


def _place_of(calls: Sequence[LedgerCall], group: tuple[int, ...], position: int) -> int:
    """Returns the place among all of a rank's calls of the call at ``position`` among those of a group."""
    return [index for index, call in enumerate(calls) if call.group == group][position]


def _compare(kind: LedgerKind, step: int, ours: _ByRank, theirs: _ByRank) -> LedgerComparison:
    num_calls = 0
    difference: LedgerDifference | None = None
    for (place, mine), (_, other) in zip(ours, theirs, strict=True):
        position = _first_difference(mine, other)
        num_calls += len(mine) if position is None else position
        if position is not None and difference is None:
            difference = _difference_at(position, (mine, other), (place,))
    return LedgerComparison(kind=kind, step=step, num_ranks=len(ours), num_calls=num_calls, difference=difference)


def _first_difference(mine: Sequence[LedgerCall], other: Sequence[LedgerCall]) -> int | None:
    pairs = zip(mine, other, strict=False)
    position = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
    # Where one list ends early, the first missing call is the difference.
    if position is None and len(mine) != len(other):
        return min(len(mine), len(other))
    return position


def _difference_at(
    position: int,
    sequences: tuple[Sequence[LedgerCall], Sequence[LedgerCall]],
    places: tuple[RankPlace, ...],
    *,
    group: tuple[int, ...] = (),
) -> LedgerDifference:
    mine, other = (own[position] if position < len(own) else None for own in sequences)
    lengths = (len(sequences[0]), len(sequences[1]))
    return LedgerDifference(position=position, calls=(mine, other), num_calls=lengths, places=places, group=group)


def _is_one_sided(call: LedgerCall) -> bool:
    return call.operation in {"send", "recv"}


def _where(place: RankPlace) -> tuple[int, tuple[tuple[str, int], ...]]:
    return place.global_rank, tuple(sorted(place.coordinates.items()))


_ByRank = list[tuple[RankPlace, Sequence[LedgerCall]]]


def _calls_by_rank(reader: LedgerSource, step: int, kind: LedgerKind) -> _ByRank:
    """Returns the calls of each rank with such a ledger; empty where none has."""
    return [
        (place, footer.ledgers.get(kind, _NO_CALLS)) for place, footer in reader.footers(step) if kind in footer.ledgers
    ]
