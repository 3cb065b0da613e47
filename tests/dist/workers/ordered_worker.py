"""Sums of 4 gloo processes with and without ``order.ordered_reductions``: ``-m tests.dist.workers.ordered_worker FOLDER``.

Writes to ``FOLDER/{rank}.safetensors`` what each function gives, by ``{function}.{dtype}``; library sums by
``library.{function}.{dtype}``; and to ``FOLDER/{rank}.json`` counts and refusals. Nothing is judged here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import mappings
from safetensors.torch import save_file

from mock_scheduler.errors import DeterminismError
from mock_scheduler.launch.process_group import join_process_group
from mock_scheduler.megatron.host_device import use_host_device
from mock_scheduler.megatron.ordered_collectives import OrderedReductions
from pipelines.megatron.process_of_rank import COLLECTIVE_TIMEOUT
from mock_scheduler.megatron.probe.ledgers import CallLedger

SIZE = 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def part_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's part, ``[4 · SIZE]``: every chunk has an element whose sum depends on its order, 1e8 + 1 - 1e8 + 1.

    From the left it is 1 (1e8 + 1 is rounded to 1e8); any order that joins 1 and 1 first has 2 or 0.
    """
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(4 * SIZE, generator=generator, dtype=torch.float64)
    values[::SIZE] = (1e8, 1.0, -1e8, 1.0)[rank]
    return values.to(dtype)


def all_reduce(part: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(part)
    return part


def all_reduce_async(part: torch.Tensor) -> torch.Tensor:
    work = dist.all_reduce(part, async_op=True)
    work.wait()
    work.wait()  # as often as one likes
    return part


def all_reduce_strided(part: torch.Tensor) -> torch.Tensor:
    """A row of a matrix and a number without dimensions, as losses are."""
    matrix = torch.stack([part, part])
    dist.all_reduce(matrix[1])
    dist.all_reduce(part[0])
    return torch.cat([part[:1], matrix[1, 1:]])


def all_reduce_coalesced(part: torch.Tensor) -> torch.Tensor:
    pieces = list(part.split(SIZE))
    with distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for piece in pieces:
            dist.all_reduce(piece)
    manager.wait()
    return torch.cat(pieces)


def overlapping(part: torch.Tensor) -> torch.Tensor:
    """Two groups' reductions begun in another order on odd ranks, and waited for in another than begun."""
    groups, parts = [dist.group.WORLD, OTHER_WORLD[0]], [part[:SIZE].clone(), part[SIZE:].clone()]
    order = (0, 1) if dist.get_rank() % 2 == 0 else (1, 0)
    works = {number: dist.all_reduce(parts[number], group=groups[number], async_op=True) for number in order}
    for number in reversed(order):
        works[number].wait()
    return torch.cat(parts)


def average(part: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(part, op=dist.ReduceOp.AVG)
    return part


def reduce(part: torch.Tensor) -> torch.Tensor:
    dist.reduce(part, dst=2)
    return part


def reduce_scatter_tensor(part: torch.Tensor) -> torch.Tensor:
    own = part.new_empty(SIZE)
    param_and_grad_buffer.dist_reduce_scatter_func(own, part)  # bound when Megatron was imported
    return own


def reduce_scatter_in_place(part: torch.Tensor) -> torch.Tensor:
    """As the distributed optimizer does: the result is a piece of what is given."""
    own = part[dist.get_rank() * SIZE :][:SIZE]
    with distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.reduce_scatter_tensor(own, part, async_op=True)
    manager.wait()
    return own.clone()


def reduce_scatter_mapping(part: torch.Tensor) -> torch.Tensor:
    return mappings._reduce_scatter_along_first_dim(part, group=dist.group.WORLD)


def reduce_scatter_uneven(part: torch.Tensor) -> torch.Tensor:
    """Pieces of 1, 2, 3 and 122 elements."""
    pieces = list(part.split([1, 2, 3, 4 * SIZE - 6]))
    own = torch.empty_like(pieces[dist.get_rank()])
    dist.reduce_scatter(own, pieces)
    return own


FUNCTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    all_reduce,
    all_reduce_async,
    all_reduce_strided,
    all_reduce_coalesced,
    overlapping,
    average,
    reduce,
    reduce_scatter_tensor,
    reduce_scatter_in_place,
    reduce_scatter_mapping,
    reduce_scatter_uneven,
]
OTHER_WORLD: list[dist.ProcessGroup] = []


def left_alone() -> dict[str, object]:
    """What the library reduces itself: a group of two, integers, a maximum; by how many were replaced, with results."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    two, integers, largest = torch.tensor([0.1 * rank]), torch.tensor([rank]), torch.tensor([float(rank)])
    with OrderedReductions() as mode:
        dist.all_reduce(two, group=pairs[rank // 2])
        dist.all_reduce(integers)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return {"replaced": mode.num_replaced, "two": two.item(), "integers": integers.item(), "largest": largest.item()}


def refusal() -> str:
    """The error of a product, which has an order too."""
    with OrderedReductions():
        try:
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.PRODUCT)
        except DeterminismError as error:
            return str(error)
    return ""


def listed_calls() -> list[list[object]]:
    """What a ledger writes down of an ordered reduction."""
    with OrderedReductions(), CallLedger(["collective"]) as ledger:
        dist.all_reduce(torch.ones(6))
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(8))
    return [[call.operation, list(call.group), call.dtype, call.num_elements] for call in ledger.calls["collective"]]


def main() -> None:
    """All functions, in both dtypes."""
    folder = Path(sys.argv[1])
    use_host_device()
    join_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    rank = dist.get_rank()
    OTHER_WORLD.append(dist.new_group([0, 1, 2, 3]))
    results: dict[str, torch.Tensor] = {}
    for name, dtype in DTYPES.items():
        results[f"library.all_reduce.{name}"] = all_reduce(part_of(rank, dtype))
        with OrderedReductions():
            for function in FUNCTIONS:
                results[f"{function.__name__}.{name}"] = function(part_of(rank, dtype))
    save_file(results, folder / f"{rank}.safetensors")
    notes = {"left_alone": left_alone(), "refusal": refusal(), "calls": listed_calls()}
    (folder / f"{rank}.json").write_text(json.dumps(notes), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
