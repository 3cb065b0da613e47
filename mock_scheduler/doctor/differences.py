"""Says each rank's first difference between two runs of a step, and the one behind all others.

Contract: imports no torch. A rank may only have received its difference, by a communication to which another rank gave
other bits: it is then not the origin. The n-th communication of one kind in one group is the same on all its ranks; a
receive matches the n-th send of its peer to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from mock_scheduler.determinism.operations import OperationLogHeader, OperationRecord


class ReadableLog(Protocol):
    """An operation log to compare: ``operations.OperationLog``, or records in memory."""

    @property
    def header(self) -> OperationLogHeader:
        """Step, rank and settings."""

    def records(self) -> Iterable[OperationRecord]:
        """Yields all records in order; may be called more than once."""


class DifferenceKind(StrEnum):
    """The meaning of a first difference."""

    NOT_REPEATABLE = "operation is not repeatable"
    DIFFERED_BEFORE = "differed before the step used it"
    NOT_DISPATCHED = "changed outside of torch's operations"
    OTHER_TENSOR = "program used another tensor"
    OTHER_PATH = "program took another path"
    ENDED_EARLIER = "program ended earlier"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Holds the first difference of one rank.

    ``first``, ``second``: the record of each run; ``None`` where the run had ended. ``tensors``: names of the differing
    tensors, or ``returned value``. ``previous``: the last equal record before it. ``writer``: for a change outside of
    torch's operations, the last record with this memory; up to it the memory was equal.
    """

    global_rank: int
    kind: DifferenceKind
    first: OperationRecord | None
    second: OperationRecord | None
    tensors: tuple[str, ...] = ()
    previous: OperationRecord | None = None
    writer: OperationRecord | None = None

    @property
    def record(self) -> OperationRecord:
        """The record of the first run, or of the second where the first had ended."""
        record = self.first or self.second
        assert record is not None  # a difference is one of records
        return record

    def describe(self) -> str:
        """Says the difference in one or two sentences, without the rank."""
        operation = self.record.describe()
        names = ", ".join(self.tensors)
        match self.kind:
            case DifferenceKind.NOT_REPEATABLE:
                return f"{operation}: the same inputs gave another {names}{self._unseen()}"
            case DifferenceKind.DIFFERED_BEFORE:
                return (
                    f"{operation}: {names} differs at its first use in this step, so it differed before the step "
                    "began, or was made by something that torch does not dispatch"
                )
            case DifferenceKind.NOT_DISPATCHED:
                return (
                    f"{operation}: {names} differs, though no operation before it did; it was changed between "
                    f"{_describe(self.writer)} and this one by something that torch does not "
                    "dispatch: a kernel of TransformerEngine, apex or Triton, compiled code, an extension, or NumPy"
                )
            case DifferenceKind.OTHER_TENSOR:
                return (
                    f"{operation}: for {names} the two runs used different tensors, each computed earlier; the "
                    "program went through its tensors in another order, or chose another one"
                )
            case DifferenceKind.OTHER_PATH:
                return (
                    f"after {_describe(self.previous)} the first run went on with {_describe(self.first)}"
                    f"{_arguments(self.first)}, the second with {_describe(self.second)}{_arguments(self.second)}"
                )
            case DifferenceKind.ENDED_EARLIER:
                ended = "first" if self.first is None else "second"
                return f"after {_describe(self.previous)} the {ended} run had ended; the other went on with {operation}"

    def _unseen(self) -> str:
        unseen = ", ".join(tensor.name for tensor in self.record.inputs if tensor.note == "uninitialised")
        return f" (what {unseen} held before could not be compared)" if unseen else ""


def _describe(record: OperationRecord | None) -> str:
    return "the start" if record is None else record.describe()


def _arguments(record: OperationRecord | None) -> str:
    assert record is not None
    tensors = [tensor.describe() for tensor in record.inputs]
    return f" on ({', '.join([*tensors, *([record.arguments] if record.arguments else [])])})"


def find_origin(differences: Sequence[Difference], logs: Mapping[int, ReadableLog]) -> Difference | None:
    """Finds the earliest difference that no other rank's explains; logs: of one run, by global rank."""
    by_rank = {difference.global_rank: difference for difference in differences}
    origins = [difference for difference in differences if not _was_received(difference, by_rank=by_rank, logs=logs)]
    # Differences that explain each other in a circle cannot be; were they to, the earliest is as good as any.
    return min(origins or differences, key=_when, default=None)


def _when(difference: Difference) -> tuple[int, int]:
    return difference.record.number, difference.global_rank


def _was_received(
    difference: Difference, *, by_rank: Mapping[int, Difference], logs: Mapping[int, ReadableLog]
) -> bool:
    """Says whether another rank differed before it took part in the communication that brought this difference."""
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
    """Says whether a rank differs only in the results of the same communication: it is then no cause either."""
    record = difference.record
    began = record.number if record.completes is None else record.completes
    return began == took_part and difference.kind is DifferenceKind.NOT_REPEATABLE


def _count_alike(log: ReadableLog, communication: OperationRecord, *, before: int) -> int:
    """Counts the communications of the same kind and group (and peer) that this rank began earlier."""
    return sum(
        record.completes is None
        and record.number < before
        and (record.operator, record.group, record.peer)
        == (communication.operator, communication.group, communication.peer)
        for record in log.records()
    )


def _nth_alike(log: ReadableLog, communication: OperationRecord, *, index: int, sends_to: int | None) -> int | None:
    """Numbers the record by which another rank took part; ``sends_to``: for a receive, the receiving rank."""
    operator = communication.operator if sends_to is None else "c10d.send.default"
    alike = (
        record.number
        for record in log.records()
        if record.completes is None
        and (record.operator, record.group, record.peer) == (operator, communication.group, sends_to)
    )
    return next((number for position, number in enumerate(alike) if position == index), None)
