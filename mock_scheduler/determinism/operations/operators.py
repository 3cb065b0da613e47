"""Facts of an operator from its schema: tensors it overwrites, tensors without meaning, and views.

Contract: facts of operators alone, from torch's schemas and the tables below (torch 2.13); nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
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
    """One operator overload.

    Args:
        written: Names of the arguments it writes.
        overwritten: Written arguments whose content it never reads.
        results: Names of its results, ``None`` for a result equal to an argument.
        has_digests: Its bits are worth a digest; bits of a view or of fresh memory are not.
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
        """Returns the given arguments by name, without defaults left out."""
        if not self.arguments:
            return {f"argument{position}": value for position, value in enumerate(args)} | dict(kwargs)
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}

    def unread(self, bound: Mapping[str, Any]) -> frozenset[str]:
        """Returns arguments whose content this call does not read.

        ``addmm`` and its kin ignore ``self`` where ``beta`` is 0 (torch documentation); Megatron's attention gives
        memory there nothing has written.
        """
        is_ignored = "beta" in self.arguments and bound.get("beta", 1) == 0
        return self.overwritten | {"self"} if is_ignored else self.overwritten


@cache
def facts_of(operator: Any) -> OperatorFacts:  # noqa: ANN401 - OpOverload or HigherOrderOperator, untyped in torch
    """Returns the facts of one overload; of a higher-order operator, which has no schema, only the name."""
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
    """Whether a tensor of this name may hold anything without any effect on the run."""
    return argument_of(name) in _SCRATCH_NAMES


def flatten_tensors(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor in an argument or result, with its name: ``tensors[0]``."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from flatten_tensors(f"{name}[{position}]", item)


def has_tensors(value: object) -> bool:
    """Whether there is any tensor in an argument or result."""
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
