"""Four gloo processes: with ``order.ordered_reductions`` every sum is the left fold over the ranks, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mock_scheduler.config.instruments import OrderConfig
from mock_scheduler.megatron.ordered_collectives import fold_in_order, use_ordered_reductions
from tests.dist.conftest import launch
from tests.dist.workers.ordered_worker import DTYPES, SIZE, part_of

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launch

WHOLE = ("all_reduce", "all_reduce_async", "all_reduce_strided", "all_reduce_coalesced", "overlapping")
SCATTERED = ("reduce_scatter_tensor", "reduce_scatter_in_place", "reduce_scatter_mapping")
dtypes = pytest.mark.parametrize("dtype", list(DTYPES))
ranks = pytest.mark.parametrize("rank", range(4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the four processes wrote."""
    path = tmp_path_factory.mktemp("ordered")
    launch(4, path, (), module="tests.dist.workers.ordered_worker")
    return path


def found(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"{rank}.safetensors")


def notes(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))


def left_fold(dtype: str) -> torch.Tensor:
    """((r0 + r1) + r2) + r3, written out."""
    parts = [part_of(rank, DTYPES[dtype]) for rank in range(4)]
    return ((parts[0] + parts[1]) + parts[2]) + parts[3]


@dtypes
@ranks
@pytest.mark.parametrize("function", WHOLE)
def test_every_all_reduce_is_the_left_fold(folder: Path, rank: int, dtype: str, function: str) -> None:
    """Also begun and waited for later, of a view, of several tensors in one, and of two groups begun in two orders."""
    assert torch.equal(found(folder, rank)[f"{function}.{dtype}"], left_fold(dtype))


@dtypes
@ranks
@pytest.mark.parametrize("function", SCATTERED)
def test_every_reduce_scatter_is_its_piece_of_the_left_fold(folder: Path, rank: int, dtype: str, function: str) -> None:
    """Through names that Megatron's modules bound when they were imported too."""
    assert torch.equal(found(folder, rank)[f"{function}.{dtype}"], left_fold(dtype)[rank * SIZE :][:SIZE])


@dtypes
@ranks
def test_uneven_pieces_are_the_left_fold_too(folder: Path, rank: int, dtype: str) -> None:
    expected = left_fold(dtype).split([1, 2, 3, 4 * SIZE - 6])[rank]
    assert torch.equal(found(folder, rank)[f"reduce_scatter_uneven.{dtype}"], expected)


@dtypes
@ranks
def test_an_average_is_the_left_fold_divided_once(folder: Path, rank: int, dtype: str) -> None:
    assert torch.equal(found(folder, rank)[f"average.{dtype}"], left_fold(dtype) / 4)


@dtypes
@ranks
def test_a_reduce_changes_its_root_alone(folder: Path, rank: int, dtype: str) -> None:
    expected = left_fold(dtype) if rank == 2 else part_of(rank, DTYPES[dtype])
    assert torch.equal(found(folder, rank)[f"reduce.{dtype}"], expected)


@dtypes
def test_the_library_adds_in_another_order(folder: Path, dtype: str) -> None:
    """The values can tell: without the option the sum is another one."""
    assert left_fold(dtype)[::SIZE].tolist() == [1.0] * 4  # 1e8 + 1 - 1e8 + 1, from the left
    assert not torch.equal(found(folder, 0)[f"library.all_reduce.{dtype}"], left_fold(dtype))


@ranks
def test_two_terms_integers_and_maxima_are_left_to_the_library(folder: Path, rank: int) -> None:
    two = (torch.tensor([0.1 * (rank // 2 * 2)]) + torch.tensor([0.1 * (rank // 2 * 2 + 1)])).item()
    assert notes(folder, rank)["left_alone"] == {"replaced": 0, "two": two, "integers": 6, "largest": 3.0}


@ranks
def test_a_product_is_refused(folder: Path, rank: int) -> None:
    assert notes(folder, rank)["refusal"] == (
        "order.ordered_reductions: c10d.allreduce_.default with PRODUCT over 4 ranks: only SUM and AVG are made in "
        "the order of the ranks; switch it off"
    )


@ranks
def test_a_ledger_lists_the_reduction_that_was_asked_for(folder: Path, rank: int) -> None:
    """Not the gather that makes it: ledgers of runs with and without the option are the same."""
    world = [0, 1, 2, 3]
    assert notes(folder, rank)["calls"] == [
        ["all_reduce", world, "float32", 6],
        ["reduce_scatter", world, "float32", 8],
    ]


def test_a_fold_rounds_after_each_addition() -> None:
    """In bfloat16 256 + 1 is 256 (spacing 2, ties to even), twice; 1 + 1 + 256 is 258."""
    large_first = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert fold_in_order(large_first).tolist() == [256.0]
    assert fold_in_order(large_first.flip(0)).tolist() == [258.0]


def test_a_fold_leaves_its_parts_as_they_are() -> None:
    parts = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert fold_in_order(parts).tolist() == [4.0, 6.0]
    assert parts.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_the_option_is_off_by_default_and_ends_with_its_block() -> None:
    def num_modes() -> int:
        return torch._C._len_torch_dispatch_stack()

    with use_ordered_reductions(OrderConfig()):
        assert num_modes() == 0
    with use_ordered_reductions(OrderConfig(ordered_reductions=True)):
        assert num_modes() == 1
    assert num_modes() == 0
