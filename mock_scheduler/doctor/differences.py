"""The first difference of one rank between two runs of a step, and its words.

Contract: imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from mock_scheduler.determinism.operations import OperationLogHeader, OperationRecord


class ReadableLog(Protocol):
    """A log to be compared: ``operations.OperationLog``, or records in memory."""

    @property
    def header(self) -> OperationLogHeader:
        """Step, rank and settings."""

    def records(self) -> Iterable[OperationRecord]:
        """Returns all records in order; may be asked for more than once."""


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
    """The first difference of one rank.

    Args:
        global_rank: Of the rank.
        kind: Its meaning.
        first: The first run's record; ``None`` where the run had ended.
        second: The second run's record; as ``first``.
        tensors: Names of the unequal tensors, or ``returned value``.
        previous: The last record before it, equal in both runs.
        writer: Where something changed outside of torch's operations, the last record with this memory, up to which it
            was equal.
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
        """The record of the run with one."""
        record = self.first or self.second
        assert record is not None  # a difference is one of records
        return record

    def describe(self) -> str:
        """Says the difference in one or two sentences, without the rank."""
        what = self.record.describe()
        names = ", ".join(self.tensors)
        match self.kind:
            case DifferenceKind.NOT_REPEATABLE:
                return f"{what}: the same inputs gave another {names}{self._unseen()}"
            case DifferenceKind.DIFFERED_BEFORE:
                return (
                    f"{what}: {names} differs at its first use in this step, so it differed before the step began, or "
                    "was made by something that torch does not dispatch"
                )
            case DifferenceKind.NOT_DISPATCHED:
                return (
                    f"{what}: {names} differs, though no operation before it did; it was changed between "
                    f"{_describe(self.writer)} and this one by something that torch does not "
                    "dispatch: a kernel of TransformerEngine, apex or Triton, compiled code, an extension, or NumPy"
                )
            case DifferenceKind.OTHER_TENSOR:
                return (
                    f"{what}: for {names} the two runs used different tensors, each computed earlier; the program "
                    "went through its tensors in another order, or chose another one"
                )
            case DifferenceKind.OTHER_PATH:
                return (
                    f"after {_describe(self.previous)} the first run went on with {_describe(self.first)}"
                    f"{_arguments(self.first)}, the second with {_describe(self.second)}{_arguments(self.second)}"
                )
            case DifferenceKind.ENDED_EARLIER:
                ended = "first" if self.first is None else "second"
                return f"after {_describe(self.previous)} the {ended} run had ended; the other went on with {what}"

    def _unseen(self) -> str:
        unseen = ", ".join(tensor.name for tensor in self.record.inputs if tensor.note == "uninitialised")
        return f" (what {unseen} held before could not be compared)" if unseen else ""


def _describe(record: OperationRecord | None) -> str:
    return "the start" if record is None else record.describe()


def _arguments(record: OperationRecord | None) -> str:
    assert record is not None
    tensors = [tensor.describe() for tensor in record.inputs]
    return f" on ({', '.join([*tensors, *([record.arguments] if record.arguments else [])])})"
