"""Compares the operation logs of two runs of the same step, to find their first difference.

Contract: pure; imports no torch. Within a rank (and there within a lane) records are compared in order, and the first
differing one is the rank's difference; nothing after it is looked at. ``differences.find_origin`` chooses among ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from mock_scheduler.determinism.operations import OperationRecord, TensorRecord
from mock_scheduler.doctor.differences import Difference, DifferenceKind, ReadableLog, find_origin
from mock_scheduler.errors import TraceError


@dataclass(frozen=True, kw_only=True, slots=True)
class RankComparison:
    """One rank: the number of equal operations, and the first difference. ``num_digests``: of the equal records."""

    global_rank: int
    num_operations: int
    num_digests: int
    difference: Difference | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepComparison:
    """Holds all ranks of one step. ``origin``: the difference behind all others, as far as the logs show."""

    step: int
    ranks: tuple[RankComparison, ...]
    origin: Difference | None

    @property
    def num_operations(self) -> int:
        """Returns compared and equal operations, over all ranks."""
        return sum(compared.num_operations for compared in self.ranks)

    @property
    def num_digests(self) -> int:
        """Counts tensors with compared and equal digests, over all ranks."""
        return sum(compared.num_digests for compared in self.ranks)


def compare_step(step: int, first: Mapping[int, ReadableLog], second: Mapping[int, ReadableLog]) -> StepComparison:
    """Compares one step's operation logs, by global rank. Raises ``TraceError`` where a rank has none in one run."""
    if first.keys() != second.keys() or not first:
        raise TraceError(
            f"step {step}: the first run has operation logs of ranks {sorted(first)}, the second of "
            f"{sorted(second)}; both must have those of all ranks"
        )
    ranks = tuple(compare_rank(first[global_rank], second[global_rank]) for global_rank in sorted(first))
    differences = [compared.difference for compared in ranks if compared.difference is not None]
    return StepComparison(step=step, ranks=ranks, origin=find_origin(differences, first))


def compare_rank(first: ReadableLog, second: ReadableLog) -> RankComparison:
    """Compares two operation logs of one rank record by record; views are passed over."""
    # megatron-core 0.19.2 makes some views in the order of a set of parameters, which differs between processes and
    # changes no bit.
    previous: OperationRecord | None = None
    num_operations = num_digests = 0
    difference = None
    for one, other in _pair_lanes(_computations(first), _computations(second)):
        difference = _compare_records(one, other, global_rank=first.header.global_rank, previous=previous)
        if difference is not None:
            break
        assert one is not None  # two records that do not differ are both there
        previous = one
        num_operations += one.completes is None
        num_digests += one.num_digests
    if difference is not None and difference.kind is DifferenceKind.NOT_DISPATCHED:
        difference = _explain_input(difference, first, second)
    return RankComparison(
        global_rank=first.header.global_rank,
        num_operations=num_operations,
        num_digests=num_digests,
        difference=difference,
    )


def _computations(log: ReadableLog) -> Iterator[OperationRecord]:
    return (record for record in log.records() if record.is_computation)


_Pair = tuple[OperationRecord | None, OperationRecord | None]


def _pair_lanes(first: Iterable[OperationRecord], second: Iterable[OperationRecord]) -> Iterator[_Pair]:
    """Pairs the n-th records of each lane: threads may interleave in another way."""
    waiting: dict[str, tuple[deque[OperationRecord], deque[OperationRecord]]] = {}
    for pair in zip_longest(first, second):
        for side, record in enumerate(pair):
            if record is not None:
                waiting.setdefault(record.lane, (deque(), deque()))[side].append(record)
        for ones, others in waiting.values():
            while ones and others:
                yield ones.popleft(), others.popleft()
    left = [
        (record, None) if side == 0 else (None, record)
        for queues in waiting.values()
        for side, queue in enumerate(queues)
        for record in queue
    ]
    yield from sorted(left, key=lambda pair: next(record.number for record in pair if record is not None))


def _compare_records(
    first: OperationRecord | None,
    second: OperationRecord | None,
    *,
    global_rank: int,
    previous: OperationRecord | None,
) -> Difference | None:
    tensors: list[str] = []
    if first is None or second is None:
        kind = DifferenceKind.ENDED_EARLIER
    elif _path(first) != _path(second):
        kind = DifferenceKind.OTHER_PATH
    elif tensors := _differing(first.inputs, second.inputs):
        kind = DifferenceKind.NOT_DISPATCHED
    elif tensors := _differing(first.outputs, second.outputs):
        kind = DifferenceKind.NOT_REPEATABLE
    elif first.values != second.values:
        kind, tensors = DifferenceKind.NOT_REPEATABLE, ["returned value"]
    else:
        return None
    return Difference(
        global_rank=global_rank,
        kind=kind,
        first=first,
        second=second,
        tensors=tuple(tensors),
        previous=previous,
    )


def _path(record: OperationRecord) -> tuple[object, ...]:
    """Returns the facts about a record that must be equal before bits can be compared."""
    return (
        *(record.operator, record.phase, record.module, record.node, record.place, record.device, record.arguments),
        *(record.group, record.peer, record.completes is None),
        _layout(record.inputs),
        # An output's shape is a result, as of nonzero, so only their number is compared.
        len(record.outputs),
    )


def _layout(tensors: Sequence[TensorRecord]) -> tuple[tuple[object, ...], ...]:
    return tuple((tensor.name, tensor.dtype, tensor.shape, tensor.note) for tensor in tensors)


def _differing(first: Sequence[TensorRecord], second: Sequence[TensorRecord]) -> list[str]:
    return [
        one.describe()
        for one, other in zip(first, second, strict=True)
        if (one.digest, one.shape, one.dtype) != (other.digest, other.shape, other.dtype)
    ]


def _explain_input(difference: Difference, first: ReadableLog, second: ReadableLog) -> Difference:
    """Finds out whether the program took another tensor; else up to which record the changed memory was equal."""
    index = next(
        position
        for position, tensor in enumerate(difference.record.inputs)
        if tensor.describe() == difference.tensors[0]
    )
    ones, others = (_mentions(log, record, index) for log, record in _sides(difference, first, second))
    if ones.storage != others.storage and ones.was_digest_seen and others.was_digest_seen:
        return replace(difference, kind=DifferenceKind.OTHER_TENSOR)
    if ones.last is None:
        return replace(difference, kind=DifferenceKind.DIFFERED_BEFORE)
    return replace(difference, writer=ones.last)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mentions:
    """Earlier records about an input: its memory, its last record, and whether its bits were seen."""

    storage: int
    last: OperationRecord | None
    was_digest_seen: bool


def _mentions(log: ReadableLog, record: OperationRecord, index: int) -> _Mentions:
    tensor = record.inputs[index]
    last, was_digest_seen = None, False
    for earlier in log.records():
        if earlier.number >= record.number:
            break
        mentioned = [other for other in (*earlier.inputs, *earlier.outputs) if other.note != "view"]
        if any(other.storage == tensor.storage for other in mentioned):
            last = earlier
        was_digest_seen = was_digest_seen or any(other.digest == tensor.digest for other in mentioned)
    return _Mentions(storage=tensor.storage, last=last, was_digest_seen=was_digest_seen)


def _sides(
    difference: Difference, first: ReadableLog, second: ReadableLog
) -> tuple[tuple[ReadableLog, OperationRecord], tuple[ReadableLog, OperationRecord]]:
    assert difference.first is not None  # a difference of inputs has both records
    assert difference.second is not None
    return (first, difference.first), (second, difference.second)
