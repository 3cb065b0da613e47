"""Finds the one of several unequal ranks from which the others follow.

Contract: imports no torch. A rank may first differ in the result of a communication, with equal inputs of its own. It
only received the difference where another rank of the communication differed before it took part. The n-th
communication of one kind in one group is the same on all its ranks; a receive matches the n-th send of its peer to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mock_scheduler.determinism.operations import OperationRecord
from mock_scheduler.doctor.differences import Difference, DifferenceKind, ReadableLog


def find_origin(differences: Sequence[Difference], logs: Mapping[int, ReadableLog]) -> Difference | None:
    """Finds the earliest difference no other rank's explains; ``logs``: of one run, by global rank."""
    by_rank = {difference.global_rank: difference for difference in differences}
    origins = [difference for difference in differences if not _was_received(difference, by_rank=by_rank, logs=logs)]
    # Differences that explain each other in a circle cannot be; were they to, the earliest is as good as any.
    return min(origins or differences, key=_when, default=None)


def _when(difference: Difference) -> tuple[int, int]:
    return difference.record.number, difference.global_rank


def _was_received(
    difference: Difference, *, by_rank: Mapping[int, Difference], logs: Mapping[int, ReadableLog]
) -> bool:
    """Whether another rank's bits differed before it took part in the communication behind this difference."""
    record = difference.record
    if record.group is None or difference.kind is not DifferenceKind.NOT_REPEATABLE:
        return False
    began = record.number if record.completes is None else record.completes
    index = _count_alike(logs[difference.global_rank], record, before=began)
    sends_to = difference.global_rank if record.peer is not None else None
    senders = record.group if record.peer is None else (record.peer,)
    for global_rank in senders:
        other = by_rank.get(global_rank)
        if global_rank == difference.global_rank or other is None:
            continue
        took_part = _nth_alike(logs[global_rank], record, index=index, sends_to=sends_to)
        if took_part is not None and other.record.number <= took_part and not _is_same_result(other, took_part):
            return True
    return False


def _is_same_result(difference: Difference, took_part: int) -> bool:
    """Whether a rank differs only in the result of the communication, with equal inputs: no cause, a victim as well."""
    record = difference.record
    began = record.number if record.completes is None else record.completes
    return began == took_part and difference.kind is DifferenceKind.NOT_REPEATABLE


def _count_alike(log: ReadableLog, communication: OperationRecord, *, before: int) -> int:
    """Counts earlier communications of the same kind and group (and peer) on this rank."""
    return sum(
        record.completes is None
        and record.number < before
        and (record.operator, record.group, record.peer)
        == (communication.operator, communication.group, communication.peer)
        for record in log.records()
    )


def _nth_alike(log: ReadableLog, communication: OperationRecord, *, index: int, sends_to: int | None) -> int | None:
    """Returns the number of the record with which another rank took part; ``sends_to``: for a receive, its rank."""
    operator = communication.operator if sends_to is None else "c10d.send.default"
    alike = (
        record.number
        for record in log.records()
        if record.completes is None
        and (record.operator, record.group, record.peer) == (operator, communication.group, sends_to)
    )
    return next((number for position, number in enumerate(alike) if position == index), None)
