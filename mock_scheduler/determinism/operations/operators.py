"""States facts about torch's operators and communications: the tensors they read, write and return, and when.

Contract: facts come from torch's schemas and the tables below (torch 2.13). Nothing here runs an operator,
communicates, waits, or keeps a tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group
from torch._ops import HigherOrderOperator

UNINITIALISED = "uninitialised"

_ALLOCATORS = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "empty_quantized", "new_empty", "new_empty_strided"}
    | {"resize_", "resize_as_", "set_"}
)
# In-place operators whose result does not depend on what was there.
_OVERWRITING = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_"}
    | {"cauchy_", "log_normal_", "_foreach_copy_", "_foreach_zero_"}
)
# Random states and reserves of attention, dropout, batch norm and RNNs: not written at all where they are not needed.
_SCRATCH_NAMES = frozenset(
    {"rng_state", "unused", "debug_attn_mask", "philox_seed", "philox_offset", "reserve", "reserveSpace", "workspace"}
)
# Their tensor only says on which device.
_WITHOUT_DATA = frozenset({"barrier", "monitored_barrier_"})
_OUTPUT_ARGUMENTS = frozenset({"output_tensor", "output_tensors", "output_lists", "output", "outputs"})
COMMUNICATION_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
WAIT = "_c10d_functional.wait_tensor.default"
RECEIVES = ("c10d.recv_.default", "c10d.recv_any_source_.default")
SENDS = ("c10d.send.default",)
# Only the root's tensor is defined after a reduce, and only the root's is read by a broadcast.
REDUCES_TO_ROOT = "c10d.reduce_.default"
BROADCASTS = "c10d.broadcast_.default"


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorFacts:
    """Holds one operator overload.

    ``written``: names of written arguments; ``overwritten``: the ones among them whose content it never reads.
    ``results``: names of its results, ``None`` for one of its arguments. ``has_digests``: whether its bits are worth a
    digest, unlike the bits of a view or of fresh memory.
    """

    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    overwritten: frozenset[str]
    results: tuple[str | None, ...]
    has_digests: bool
    note: str
    is_communication: bool

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Names the given arguments, without defaults."""
        if not self.arguments:
            return {f"argument{position}": value for position, value in enumerate(args)} | dict(kwargs)
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}

    def unread(self, bound: Mapping[str, Any]) -> frozenset[str]:
        """Names the arguments whose content this call does not read."""
        # addmm and its kin ignore self where beta is 0 (torch documentation); Megatron's attention gives memory there
        # that nothing has written.
        is_ignored = "beta" in self.arguments and bound.get("beta", 1) == 0
        return self.overwritten | {"self"} if is_ignored else self.overwritten


@cache
def facts_of(operator: Any) -> OperatorFacts:  # noqa: ANN401 - OpOverload or HigherOrderOperator, untyped in torch
    """Finds the facts of one overload; of a higher-order operator, which has no schema, only the name."""
    if isinstance(operator, HigherOrderOperator):
        return OperatorFacts(
            name=f"higher_order.{operator}",
            arguments=(),
            written=frozenset(),
            overwritten=frozenset(),
            results=(),
            has_digests=True,
            note="",
            is_communication=False,
        )
    schema = operator._schema
    name, namespace = str(operator), operator.namespace
    base = schema.name.rpartition("::")[2]
    written = {argument.name for argument in schema.arguments if _is_written(argument)}
    is_communication = namespace in COMMUNICATION_NAMESPACES
    if namespace == "c10d" and name not in SENDS:  # its schemas do not say what is written in place
        names = {argument.name for argument in schema.arguments}
        written |= names & _OUTPUT_ARGUMENTS or names & {"tensors"}
    overwritten = {
        argument
        for argument in written
        if base in _OVERWRITING or name in RECEIVES or _is_output(schema, argument, namespace)
    }
    is_allocator = base in _ALLOCATORS
    return OperatorFacts(
        name=name,
        arguments=tuple(argument.name for argument in schema.arguments),
        written=frozenset(written),
        overwritten=frozenset(overwritten),
        results=tuple(_result_names(schema, namespace)),
        has_digests=not (is_allocator or operator.is_view or base in _WITHOUT_DATA),
        note=UNINITIALISED if is_allocator else "not data" if base in _WITHOUT_DATA else "view",
        is_communication=is_communication,
    )


def argument_of(name: str) -> str:
    """Returns ``tensors`` for ``tensors[0]``."""
    return name.partition("[")[0]


def is_scratch(name: str) -> bool:
    """Says whether a tensor of this name may hold anything without any effect on the run."""
    return argument_of(name) in _SCRATCH_NAMES


def flatten_tensors(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor in an argument or result, with its name: ``tensors[0]``."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from flatten_tensors(f"{name}[{position}]", item)


def has_tensors(value: object) -> bool:
    """Says whether there is any tensor in an argument or result."""
    return next(flatten_tensors("", value), None) is not None


def _is_written(argument: Any) -> bool:  # noqa: ANN401 - torch._C.Argument
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_output(schema: Any, name: str, namespace: str) -> bool:  # noqa: ANN401 - torch._C.FunctionSchema
    if namespace == "c10d":
        return name in _OUTPUT_ARGUMENTS
    return any(argument.name == name and argument.is_out for argument in schema.arguments)


def _result_names(schema: Any, namespace: str) -> Iterator[str | None]:  # noqa: ANN401 - torch._C.FunctionSchema
    for position, result in enumerate(schema.returns):
        is_argument = namespace == "c10d" or _is_written(result)
        yield None if is_argument else result.name or (f"result[{position}]" if len(schema.returns) > 1 else "result")


_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """One communication. ``group``: global ranks, in the group's order. ``peer``: a global rank, for send and receive.

    ``unread``, ``undefined``: arguments whose content it does not read, or does not define, on this rank.
    ``is_async``: whether results may come after the call.
    """

    group: tuple[int, ...]
    peer: int | None
    unread: frozenset[str]
    undefined: frozenset[str]
    is_async: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """An asynchronous communication and its results, as far as they are still alive."""

    number: int
    operator: str
    communication: Communication
    results: tuple[tuple[str, torch.Tensor], ...]


class PendingResults:
    """Keeps unused results of asynchronous communications."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}

    def add(
        self,
        number: int,
        operator: str,
        communication: Communication,
        results: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        """Wait for the first use of any of the results."""
        if results:
            self._waiting[number] = _Waiting(
                operator=operator,
                communication=communication,
                results=tuple((name, weakref.ref(tensor), _memory_of(tensor)) for name, tensor in results),
            )

    def take(self, used: Iterable[torch.Tensor]) -> Iterator[Completed]:
        """Yields each communication with a result about to be used; it waits no more."""
        # A program that uses a result has waited for the communication; other parts of the storage prove nothing.
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
    """Reads a communication from an operation's arguments; ``None`` for any other operation."""
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
    """Returns device, first byte and end of a tensor's memory; empty without plain memory."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor.device, 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return tensor.device, start, start + (last + 1) * tensor.element_size()


def _overlap(one: _Span, other: _Span) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]
