"""Reads a dispatched communication: its group, its peer, the tensors that count, and when its results are there.

Contract: communicates nothing itself, waits for nothing and keeps no tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

from mock_scheduler.determinism.operations.operators import (
    BROADCASTS,
    RECEIVES,
    REDUCES_TO_ROOT,
    SENDS,
    WAIT,
    OperatorFacts,
)

_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """One communication.

    Args:
        group: Global ranks, in the group's order.
        peer: A global rank, for send and receive.
        unread: Arguments whose content it does not read on this rank.
        undefined: Arguments whose content it does not define on this rank.
        is_async: Its results may come after the call.
    """

    group: tuple[int, ...]
    peer: int | None
    unread: frozenset[str]
    undefined: frozenset[str]
    is_async: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """An asynchronous communication and its results still in memory."""

    number: int
    operator: str
    communication: Communication
    results: tuple[tuple[str, torch.Tensor], ...]


class PendingResults:
    """Results of asynchronous communications nothing has used yet."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}

    def add(
        self,
        number: int,
        operator: str,
        communication: Communication,
        results: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        """Waits for the first use of any of the results."""
        if results:
            self._waiting[number] = _Waiting(
                operator=operator,
                communication=communication,
                results=tuple((name, weakref.ref(tensor), _memory_of(tensor)) for name, tensor in results),
            )

    def take(self, used: Iterable[torch.Tensor]) -> Iterator[Completed]:
        """Returns results with memory about to be used, and forgets them.

        A program using it has waited for the communication; other parts of the same storage prove nothing.
        """
        if not self._waiting:
            return
        spans = [_memory_of(tensor) for tensor in used]
        for number, waiting in list(self._waiting.items()):
            alive = [(name, tensor, span) for name, ref, span in waiting.results if (tensor := ref()) is not None]
            if not alive:
                del self._waiting[number]
            elif any(_overlap(span, other) for _, _, span in alive for other in spans):
                del self._waiting[number]
                yield Completed(
                    number=number,
                    operator=waiting.operator,
                    communication=waiting.communication,
                    results=tuple((name, tensor) for name, tensor, _ in alive),
                )


_Span = tuple[torch.device, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    operator: str
    communication: Communication
    results: tuple[tuple[str, weakref.ref[torch.Tensor], _Span], ...]


def read_communication(facts: OperatorFacts, bound: Mapping[str, Any]) -> Communication | None:
    """Reads an operation as a communication; ``None`` where it is none."""
    group = _find_group(bound) if facts.is_communication and facts.name != WAIT else None
    if group is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    peer = bound.get("dst", bound.get("src")) if facts.name in (*SENDS, *RECEIVES) else None
    root = bound.get("root_rank")
    is_root = root is None or ranks[root] == dist.get_rank()
    is_functional = not facts.name.startswith("c10d.")
    return Communication(
        group=ranks,
        peer=None if peer is None else ranks[peer],
        unread=facts.overwritten | ({"tensors"} if facts.name == BROADCASTS and not is_root else _NONE),
        undefined=frozenset({"tensors"}) if facts.name == REDUCES_TO_ROOT and not is_root else _NONE,
        # Sends and receives have no such argument and always return before they are done.
        is_async=is_functional or "async_op" not in facts.arguments or bool(bound.get("async_op", True)),
    )


def _find_group(bound: Mapping[str, Any]) -> ProcessGroup | None:
    if "process_group" in bound:
        return ProcessGroup.unbox(bound["process_group"])
    name = bound.get("group_name")
    return None if name is None else _resolve_process_group(name)


def _memory_of(tensor: torch.Tensor) -> _Span:
    """Returns device, first byte and byte after the last a tensor may touch; empty without plain memory."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor.device, 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return tensor.device, start, start + (last + 1) * tensor.element_size()


def _overlap(one: _Span, other: _Span) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]
