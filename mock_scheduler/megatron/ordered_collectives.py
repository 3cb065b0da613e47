"""Makes sums over more than two ranks in the order of the ranks: ((r0 + r1) + r2) + r3, in the tensor's own dtype.

The order in which gloo and NCCL add depends on sizes, algorithm and topology. Here each rank gets the others' parts, by
an all-gather or an all-to-all, and adds them itself, so one process can repeat the sum to the last bit.

Contract: reductions are replaced behind torch's dispatcher, so the mode holds for every caller, from any module's
import, and in backward passes; a ledger entered inside sees the original reduction. Groups of one or two (two terms
have one sum) and reductions of integers and of minimum or maximum are left to the library. A sum or product of more
parts that cannot be ordered is refused. Every rank of a group must use the mode, or none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    ProcessGroup,
    PythonCallbackWork,
    ReduceOp,
    _resolve_process_group,
)
from torch.utils._python_dispatch import _disable_current_modes

from mock_scheduler.config.instruments import OrderConfig
from mock_scheduler.determinism.operations.operators import facts_of
from mock_scheduler.determinism.operations.watching import WatchingMode
from mock_scheduler.errors import DeterminismError

# The number of reductions that need no order: the same whichever two parts come first.
_FREE = frozenset(int(kind.value) for kind in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR))
_SUM, _AVERAGE = int(ReduceOp.SUM.value), int(ReduceOp.AVG.value)
_FREE_NAMES = frozenset({"min", "max", "band", "bor", "bxor"})

_Bound = Mapping[str, Any]
#: Ends a gather that is under way: waits for it, adds and writes the result.
_Finish = Callable[[], None]


def fold_in_order(parts: torch.Tensor) -> torch.Tensor:
    """Returns the sum over the first dimension, one addition after another from the first, in the tensor's own dtype.

    parts: ``[n, ...]`` with n > 0. In bfloat16 each of the n - 1 additions rounds once.
    """
    # No tree and no wider accumulator: one process must be able to repeat each rounding.
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@contextlib.contextmanager
def use_ordered_reductions(order: OrderConfig) -> Iterator[None]:
    """Make reductions in the order of the ranks inside of the block, where ``order`` says so. Every rank enters it."""
    if not order.ordered_reductions:
        yield
        return
    with OrderedReductions():
        yield


class OrderedReductions(WatchingMode):
    """The mode that replaces reductions. ``num_replaced``: how many tensors this rank had reduced by it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_replaced = 0

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run the operation; a reduction that depends on its order is made here instead."""
        if not (func.namespace in ("c10d", "_c10d_functional") and "reduce" in func._schema.name):
            return func(*args, **kwargs)
        bound = facts_of(func).bind(args, kwargs)
        if not _is_ordered(bound):
            return func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        begin = _BEGIN.get(name) if func.namespace == "c10d" else None
        if begin is None or bound.get("sparse_indices") is not None:
            raise DeterminismError(
                f"order.ordered_reductions: {func} over {_group_of(bound).size()} ranks cannot be made in the order "
                "of the ranks; switch it off, or reduce dense tensors by torch.distributed's all_reduce, reduce, "
                "reduce_scatter or reduce_scatter_tensor"
            )
        _check_operation(func, bound)
        finishes = begin(bound)
        self.num_replaced += len(finishes)
        work = _work_of(finishes, is_async=bool(bound.get("async_op", True)))
        return _RESULT[name](bound, work)


def _group_of(bound: _Bound) -> ProcessGroup:
    if "process_group" in bound:
        return ProcessGroup.unbox(bound["process_group"])
    return _resolve_process_group(bound["group_name"])


def _is_ordered(bound: _Bound) -> bool:
    """Whether the result may depend on the order of the parts."""
    operation = bound["reduce_op"]
    is_free = operation.lower() in _FREE_NAMES if isinstance(operation, str) else operation.op() in _FREE
    return not is_free and _group_of(bound).size() > 2 and _first_tensor(bound).is_floating_point()


def _first_tensor(bound: _Bound) -> torch.Tensor:
    names = ("tensors", "output_tensors", "output_tensor", "outputs", "inputs", "input")
    value = next(bound[name] for name in names if name in bound)
    return value if isinstance(value, torch.Tensor) else value[0]


def _check_operation(func: Any, bound: _Bound) -> None:  # noqa: ANN401 - OpOverload
    if bound["reduce_op"].op() not in (_SUM, _AVERAGE):
        kind = next(
            (
                kind.name
                for kind in ReduceOp.RedOpType.__members__.values()
                if int(cast(Any, kind)) == bound["reduce_op"].op()
            ),
            "?",
        )
        raise DeterminismError(
            f"order.ordered_reductions: {func} with {kind} over {_group_of(bound).size()} ranks: only SUM and AVG are "
            "made in the order of the ranks; switch it off"
        )


def _work_of(finishes: Sequence[_Finish], *, is_async: bool) -> Any:  # noqa: ANN401 - a boxed Work
    """The handle of an operation that is there when all gathers are finished: now, or when it is waited for."""
    waiting = list(finishes)

    def finish(timeout: object) -> bool:
        # Part of the reduction, which whoever watches has seen already.
        with _disable_current_modes(), torch.no_grad():
            while waiting:
                waiting.pop(0)()
        return True

    work = PythonCallbackWork(finish)
    if not is_async:
        work.wait()
    return work.boxed()


def _add(gathered: torch.Tensor, bound: _Bound) -> torch.Tensor:
    """Returns the ordered sum, or the average: the sum divided once, by the number of parts."""
    if gathered.is_cuda:  # allocated on the stream of whoever began, used on that of whoever waits
        gathered.record_stream(torch.cuda.current_stream(gathered.device))
    total = fold_in_order(gathered)
    return total.div_(len(gathered)) if bound["reduce_op"].op() == _AVERAGE else total


def _begin_gather(tensor: torch.Tensor, target: torch.Tensor | None, bound: _Bound) -> _Finish:
    """Begin to gather every rank's ``tensor``; their sum goes to ``target``, where there is one."""
    group = _group_of(bound)
    part = tensor.detach().contiguous().reshape(-1)
    gathered = part.new_empty(group.size(), part.numel())
    options = AllgatherOptions()
    options.asyncOp = True
    work = group.allgather([list(gathered.unbind(0))], [part], options)

    def finish() -> None:
        work.wait()
        if target is not None:
            target.copy_(_add(gathered, bound).view(target.shape))

    return finish


def _begin_exchange(target: torch.Tensor, part: torch.Tensor, sizes: list[int], bound: _Bound) -> _Finish:
    """Begin to give each rank its piece of ``part``, of so many elements; the sum of this rank's goes to ``target``."""
    group = _group_of(bound)
    part = part.detach().contiguous().reshape(-1)
    gathered = part.new_empty(group.size(), target.numel())
    options = AllToAllOptions()
    options.asyncOp = True
    own_sizes = [target.numel()] * group.size()
    work = group.alltoall_base(gathered.view(-1), part, own_sizes, sizes, options)

    def finish() -> None:
        work.wait()
        target.copy_(_add(gathered, bound).view(target.shape))

    return finish


def _all_reduce(bound: _Bound) -> list[_Finish]:
    return [_begin_gather(tensor, tensor, bound) for tensor in bound["tensors"]]


def _reduce(bound: _Bound) -> list[_Finish]:
    is_root = dist.get_rank(_group_of(bound)) == bound["root_rank"]
    return [_begin_gather(tensor, tensor if is_root else None, bound) for tensor in bound["tensors"]]


def _scatter_one(target: torch.Tensor, part: torch.Tensor, bound: _Bound) -> _Finish:
    return _begin_exchange(target, part, [target.numel()] * _group_of(bound).size(), bound)


def _reduce_scatter_tensor(bound: _Bound) -> list[_Finish]:
    return [_scatter_one(bound["output_tensor"], bound["input_tensor"], bound)]


def _reduce_scatter_coalesced(bound: _Bound) -> list[_Finish]:
    return [_scatter_one(target, part, bound) for target, part in zip(bound["outputs"], bound["inputs"], strict=True)]


def _reduce_scatter_list(bound: _Bound) -> list[_Finish]:
    """Pieces may differ in size from rank to rank."""
    pairs = zip(bound["output_tensors"], bound["input_tensors"], strict=True)
    return [
        _begin_exchange(
            target, torch.cat([piece.reshape(-1) for piece in pieces]), [piece.numel() for piece in pieces], bound
        )
        for target, pieces in pairs
    ]


# Operators of torch 2.13 in the namespace c10d: how each begins, and what it returns with its handle.
_BEGIN: dict[str, Callable[[_Bound], list[_Finish]]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "reduce_": _reduce,
    "reduce_scatter_": _reduce_scatter_list,
    "_reduce_scatter_base_": _reduce_scatter_tensor,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
}
_RESULT: dict[str, Callable[[_Bound, Any], Any]] = {
    "allreduce_": lambda bound, work: (bound["tensors"], work),
    "allreduce_coalesced_": lambda bound, work: work,
    "reduce_": lambda bound, work: work,
    "reduce_scatter_": lambda bound, work: (bound["output_tensors"], work),
    "_reduce_scatter_base_": lambda bound, work: (bound["output_tensor"], work),
    "reduce_scatter_tensor_coalesced_": lambda bound, work: work,
}
