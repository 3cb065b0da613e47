"""Lists the collectives and random draws of a block in the order in which this rank begins them.

Contract: it changes no bit, draws nothing and communicates nothing. It sees everything behind torch's dispatcher, from
any module's import, in forward and backward; it does not see draws of NumPy, and of kernels outside torch (fused
attention of TransformerEngine).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from mock_scheduler.config.instruments import LedgerKind
from mock_scheduler.determinism.operations.operators import (
    SENDS,
    OperatorFacts,
    facts_of,
    flatten_tensors,
    read_communication,
)
from mock_scheduler.determinism.operations.watching import WatchingMode
from mock_scheduler.support.tensor_bytes import dtype_name
from mock_scheduler.trace.entries import LedgerCall

# Operators of torch 2.13 by the words in their names, longest first; functional and in-place forms are one operation.
_OPERATIONS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "recv": "recv",
    "send": "send",
}
_BARRIER = "barrier"
# What a rank gives, where an operator also has a tensor for what it gets.
_SENT = ("input_tensors", "input_tensor", "input_list", "inputs", "input")


class CallLedger(WatchingMode):
    """The mode that lists calls of ``kinds`` while it is entered. ``calls``: by kind, in order.

    ``begin`` is told of every collective before it begins.
    """

    def __init__(self, kinds: Sequence[LedgerKind], *, begin: Callable[[LedgerCall], None] = lambda call: None) -> None:
        super().__init__()
        self.calls: dict[LedgerKind, list[LedgerCall]] = {kind: [] for kind in kinds}
        self._begin = begin

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Runs the operation, and writes its call down."""
        facts = facts_of(func)
        if facts.is_communication and "collective" in self.calls:
            call = _read_collective(facts, facts.bind(args, kwargs))
            if call is not None:
                self.calls["collective"].append(call)
                self._begin(call)
        result = func(*args, **kwargs)
        if "random" in self.calls and _may_draw(func) and _draws(func, facts.bind(args, kwargs)):
            self.calls["random"].append(_describe_draw(func, args, result))
        return result


def _read_collective(facts: OperatorFacts, bound: Mapping[str, Any]) -> LedgerCall | None:
    """One call; of a send or receive the group is sender and receiver, whoever of them this rank is."""
    communication = read_communication(facts, bound)
    if communication is None:
        return None
    operation, group = _operation_of(facts.name), communication.group
    if communication.peer is not None and facts.name in SENDS:
        group = (dist.get_rank(), communication.peer)
    elif communication.peer is not None:
        group = (communication.peer, dist.get_rank())
    tensors = [] if operation == _BARRIER else list(_sent_tensors(bound))
    return LedgerCall(
        operation=operation,
        group=group,
        dtype=dtype_name(tensors[0].dtype) if tensors else "",
        num_elements=sum(tensor.numel() for tensor in tensors),
    )


@cache
def _operation_of(operator: str) -> str:
    """Returns ``all_reduce`` for ``c10d.allreduce_.default``."""
    base = operator.split(".")[1]
    return next((name for part, name in _OPERATIONS.items() if part in base), base.strip("_"))


def _sent_tensors(bound: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yields this rank's input of a collective; of a receive, its output."""
    given = next((name for name in _SENT if name in bound), None)
    values = {given: bound[given]} if given is not None else bound
    for name, value in values.items():
        for _, tensor in flatten_tensors(name, value):
            yield tensor


@cache
def _may_draw(operator: Any) -> bool:  # noqa: ANN401 - OpOverload or HigherOrderOperator
    """Whether an operator reads a random state, by torch's own tag; backward ones only repeat a draw."""
    tags = getattr(operator, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and not _base_name(operator).endswith("_backward")


def _draws(operator: Any, bound: Mapping[str, Any]) -> bool:  # noqa: ANN401 - OpOverload
    """Whether this call draws: dropout and attention that drop nothing do not."""
    values = {item.name: item.default_value for item in operator._schema.arguments if item.has_default_value()} | dict(
        bound
    )
    is_training = values.get("train", values.get("training"))
    if is_training is False or values.get("dropout_p") == 0.0:
        return False
    return not ("dropout" in _base_name(operator) and values.get("p") == 0.0)


def _describe_draw(operator: Any, args: Sequence[Any], result: Any) -> LedgerCall:  # noqa: ANN401
    """Describes the operation by its outcome: dtype and elements of its first result."""
    tensor = next((tensor for _, tensor in flatten_tensors("result", result)), args[0])
    return LedgerCall(
        operation=_base_name(operator), group=(), dtype=dtype_name(tensor.dtype), num_elements=tensor.numel()
    )


def _base_name(operator: Any) -> str:  # noqa: ANN401 - OpOverload
    """Returns ``bernoulli_`` for ``aten.bernoulli_.float``."""
    return str(operator._schema.name).rpartition("::")[2]
