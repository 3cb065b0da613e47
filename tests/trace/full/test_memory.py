"""Memory that is used again: never while a tensor lies in it, zeroed where it must be, and bounded."""

from __future__ import annotations

import sys

import pytest
import torch

from mock_scheduler.trace.full.memory import MemoryPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is mapped on Linux only")

#: Just above the size from which on memory is kept.
SHAPE = (1100, 1024)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_memory_is_used_again_only_when_the_last_view_of_a_tensor_is_gone() -> None:
    pool = MemoryPool(num_tensors=3)
    first = pool.allocate(SHAPE, torch.float32, is_filled=False)
    view, place = first.view(-1)[5:], address(first)
    del first
    other = pool.allocate(SHAPE, torch.float32, is_filled=False)
    assert address(other) != place
    other.fill_(7.0)
    assert float(view.sum()) == 0.0
    del view
    assert address(pool.allocate(SHAPE, torch.float32, is_filled=True)) == place


@pytest.mark.parametrize(("is_filled", "expected"), [(False, 0.0), (True, 3.0)])
def test_used_memory_is_zeroed_unless_it_is_filled(is_filled: bool, expected: float) -> None:
    pool = MemoryPool(num_tensors=3)
    pool.allocate(SHAPE, torch.float32, is_filled=True).fill_(3.0)
    again = pool.allocate(SHAPE, torch.float32, is_filled=is_filled)
    assert (float(again[0, 0]), float(again[-1, -1])) == (expected, expected)


def test_memory_that_does_not_fit_is_let_go_of() -> None:
    """A tensor three times as large: with what was kept, more than is allowed."""
    pool = MemoryPool(num_tensors=1)
    small = address(pool.allocate(SHAPE, torch.float32, is_filled=True))
    large = pool.allocate((3 * SHAPE[0], SHAPE[1]), torch.float32, is_filled=True)
    assert large.shape == (3300, 1024)
    assert pool.kept_bytes == 0
    del large
    assert pool.kept_bytes == 3 * 1100 * 1024 * 4
    pool.clear()
    assert pool.kept_bytes == 0
    assert small


def test_a_tensor_outlives_its_pool() -> None:
    pool = MemoryPool(num_tensors=1)
    tensor = pool.allocate(SHAPE, torch.int64, is_filled=False)
    del pool
    assert int(tensor.add_(2).sum()) == 2 * 1100 * 1024


def test_small_tensors_are_zeros_of_their_own() -> None:
    pool = MemoryPool(num_tensors=1)
    assert torch.equal(pool.allocate((2, 3), torch.bfloat16, is_filled=True), torch.zeros(2, 3, dtype=torch.bfloat16))
