"""Blocks on several threads: the sums are those of one thread, to the last bit."""

from __future__ import annotations

import threading

import pytest
import torch

from mock_scheduler.comparison.bounds.bound import TensorBound
from mock_scheduler.comparison.measure import large_tensors
from mock_scheduler.comparison.measure.distance import compare_updates
from mock_scheduler.comparison.measure.figures import PairSums, sum_pair
from mock_scheduler.comparison.measure.large_tensors import map_blocks, split_blocks, split_chunks
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.trace.entries import TraceKey

KEY = TraceKey(step=0, update=0, kind="parameter", name="w")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a chunk, so that a small tensor has several."""
    monkeypatch.setattr(large_tensors, "BLOCK_ELEMENTS", large_tensors.CHUNK_ELEMENTS)


BOUND = TensorBound(relative=5e-3)


def measured(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> tuple[PairSums, TensorDifference]:
    monkeypatch.setattr(large_tensors, "num_threads", lambda: num_threads)
    generator = torch.Generator().manual_seed(3)
    size = 5 * large_tensors.CHUNK_ELEMENTS + 17
    before, change, noise = (torch.randn(size, generator=generator) for _ in range(3))
    after = before + change, before + change * (1 + 1e-3 * noise)
    gradients = change, change * (1 + 5e-3 * noise)
    update = compare_updates(
        KEY,
        before=(before, before),
        after=after,
        gradients=gradients,
        significant=1e-2,
        bound=BOUND,
    )
    return sum_pair(*after), update


@pytest.mark.usefixtures("small_blocks")
def test_sums_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    one, several = measured(1, monkeypatch), measured(3, monkeypatch)
    assert one == several
    assert 0 < one[1].num_excluded < one[1].num_elements // 2


def test_blocks_and_chunks_hold_every_element_once() -> None:
    assert split_blocks(0) == []
    assert split_blocks((1 << 20) + 5) == [(0, 1 << 20), (1 << 20, (1 << 20) + 5)]
    size = large_tensors.CHUNK_ELEMENTS
    assert list(split_chunks(7, 2 * size)) == [(7, size + 7), (size + 7, 2 * size)]


def test_results_come_in_the_order_of_the_blocks() -> None:
    assert map_blocks(lambda item: item * item, list(range(50))) == [item * item for item in range(50)]


def test_an_error_in_a_block_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        map_blocks(lambda item: 1 // item, [1, 0])


def test_an_error_of_another_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_tensors, "num_threads", lambda: 2)
    own, has_failed = threading.get_ident(), threading.Event()

    def compute(item: int) -> int:
        if threading.get_ident() == own:
            assert has_failed.wait(10)
            return item
        has_failed.set()
        raise ValueError("another thread's")

    with pytest.raises(ValueError, match="another thread's"):
        map_blocks(compute, list(range(4)))


def test_equal_tensors_have_their_norm_and_no_difference() -> None:
    values = torch.tensor([3.0, 4.0])
    sums = sum_pair(values, values.clone())
    assert (sums.norm, sums.is_finite, sums.figures.num_different, sums.figures.relative) == (5.0, True, 0, 0.0)


@pytest.mark.parametrize("place", [0, large_tensors.CHUNK_ELEMENTS - 1, large_tensors.CHUNK_ELEMENTS, (1 << 20) + 4])
def test_one_bit_is_found_wherever_it_lies(place: int) -> None:
    """At the start and the end of a chunk, in the next one, and in the next block."""
    values = torch.ones((1 << 20) + 5)
    changed = values.clone()
    changed.view(torch.int32)[place] ^= 1
    figures = sum_pair(values, changed).figures
    assert (figures.num_different, figures.worst.index if figures.worst else None) == (1, (place,))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_on_both_sides_is_said(value: float) -> None:
    values = torch.tensor([3.0, value, 4.0])
    sums = sum_pair(values, values.clone())
    assert (sums.norm, sums.is_finite) == (5.0, False)
    assert sum_pair(torch.ones(3), torch.tensor([1.0, value, 2.0])).is_finite is False
