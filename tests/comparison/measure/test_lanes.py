"""Sums in lanes: in C and in NumPy of the same bits, wherever a tensor begins and ends."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.comparison.measure import lanes
from mock_scheduler.comparison.measure.changes import Changes, sum_changes
from mock_scheduler.comparison.measure.figures import PairSums, sum_pair
from mock_scheduler.comparison.measure.lanes import dot, sum_changes_in_c, sum_pair_in_c
from mock_scheduler.comparison.thresholds import BLOCK_ELEMENTS, CHUNK_ELEMENTS
from mock_scheduler.support.native import load_function
from tests.comparison.measure.plain import plain_dot, without_c

NAN, INF = math.nan, math.inf
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
EDGES = [
    *(1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 2047, 2048, 2049, 2064),
    *(CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS + 1, CHUNK_ELEMENTS + 16, BLOCK_ELEMENTS + 17),
]

needs_c = pytest.mark.skipif(
    lanes._sum_pair() is None, reason="native.c is not built: no C compiler, or `pip install -e .` not yet repeated"
)


def normal(size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def between_nans(values: torch.Tensor) -> torch.Tensor:
    """The same values, at an odd address and between NaN: what is read too much makes a sum NaN."""
    size = values.element_size()
    content = bytearray(b"\xff" * (size * (len(values) + 40) + 1))
    start = 20 * size + 1
    content[start : start + size * len(values)] = values.view(torch.uint8).numpy().tobytes()
    return torch.frombuffer(content, dtype=values.dtype, count=len(values), offset=start)


@given(size=st.integers(1, 300), seed=st.integers(0, 2**31), scale=st.integers(-500, 500))
def test_a_sum_is_that_of_one_element_after_another(size: int, seed: int, scale: int) -> None:
    left, right = normal(size, seed, torch.float64) * 2.0**scale, normal(size, seed + 1, torch.float64)
    assert dot(left, right) == plain_dot(left, right)


@needs_c
@pytest.mark.parametrize("size", EDGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_ways_give_the_same_bits_at_the_edges_of_lanes_chunks_and_blocks(dtype: torch.dtype, size: int) -> None:
    left = normal(size, 1, dtype)
    right = (left * (1 + 1e-2 * normal(size, 2, dtype))).to(dtype)
    # A part with equal elements among others, and the last element alone.
    right[2048:4096] = left[2048:4096]
    right[-1] = -left[-1]
    gradients = normal(size, 3), normal(size, 3) * (1 + 1e-2 * normal(size, 4))
    sides = [between_nans(side) for side in (left, right, *gradients)]

    def compute() -> tuple[PairSums, Changes]:
        pair = sides[0], sides[1]
        old = between_nans(left * 0.5), between_nans(left * 0.75)
        return sum_pair(*pair), sum_changes(old, pair, (sides[2], sides[3]), 1e-2, is_same_before=False)

    found = compute()
    with without_c():
        assert compute() == found
    assert math.isfinite(found[1].distance)
    assert found[0].is_finite
    assert found[0].figures.num_different == int((left.double() != right.double()).sum())


@needs_c
@pytest.mark.parametrize("kind", ["any", "avx2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_passes_for_other_processors_give_the_same_bits(
    dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind != "any" and kind not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip(f"this processor has no {kind}")
    left = normal(5003, 1, dtype)
    right = (left * (1 + 1e-2 * normal(5003, 2, dtype))).to(dtype)
    right[::17], right[2048:4096] = -right[::17], left[2048:4096]

    def compute() -> list[PairSums | Changes]:
        pairs, old = (right, left), (left * 0.5, left * 0.75)
        changes = [
            sum_changes((old[0], other), pairs, gradients, 1e-2, is_same_before=other is old[0])
            for other in old
            for gradients in (None, pairs, (left.double(), right.double()), (left.float(), right.float()))
        ]
        return [sum_pair(left, right), *changes]

    found = compute()
    for name, types, result in (("sum_pair", *lanes.SUM_PAIR), ("sum_changes", *lanes.SUM_CHANGES)):
        function = load_function(lanes.__file__, f"{name}_{kind}", types, result)
        if function is None:
            pytest.skip("built for one kind of processor alone")
        monkeypatch.setattr(lanes, f"_{name}", lambda function=function: function)
    assert compute() == found


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c_says_what_differs(dtype: torch.dtype) -> None:
    left = torch.ones(5000, dtype=dtype)
    left[10], left[4000] = 0.0, 2.0
    right = left.clone()
    right[10] = -0.0
    squares = [1.0, 2.0, 3.0, 4.0]
    found = sum_pair_in_c(left, right, squares)
    assert found == lanes.PairExtremes(max_abs=0.0, num_different=1, first=10, worst=-1, max_ulp=0)
    assert squares == [5003.0, 5004.0, 5005.0, 4.0]
    # The first of two equally large differences, whichever its sign, and not the first different element.
    right[[3000, 4000, 4500]] = torch.tensor([3.0, 0.0, 3.0], dtype=dtype)
    found = sum_pair_in_c(left, right, squares)
    assert found is not None
    assert (found.max_abs, found.num_different, found.first, found.worst) == (2.0, 4, 10, 3000)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("is_other", [False, True])
def test_what_is_not_finite_is_left_to_the_other_way(dtype: torch.dtype, value: float, is_other: bool) -> None:
    left = torch.ones(5000, dtype=dtype)
    right = left * 2 if is_other else left.clone()
    right[4999] = value
    if not is_other:
        left[4999] = value
    squares = [1.0] * 4
    assert (sum_pair_in_c(left, right, squares), squares) == (None, [1.0] * 4)


@needs_c
def test_squares_that_overflow_are_infinite_in_both_ways() -> None:
    left, right = torch.full((40,), 1e200, dtype=torch.float64), torch.full((40,), -1e200, dtype=torch.float64)
    sums = sum_pair(left, right)
    assert (sums.norm, sums.figures.norm, sums.is_finite, sums.figures.max_abs) == (INF, INF, True, 2e200)
    with without_c():
        assert repr(sum_pair(left, right)) == repr(sums)


@needs_c
def test_c_reads_dense_tensors_of_one_dtype_that_it_knows() -> None:
    values, half = normal(64, 1), normal(64, 1).half()
    assert sum_pair_in_c(values[::2], values[::2], [0.0] * 4) is None
    assert sum_pair_in_c(half, half, [0.0] * 4) is None
    sums = [0.0] * 3
    assert sum_changes_in_c([values], [values, values], [values, values.double()], 0.1, sums) is None
    assert sum_changes_in_c([values.double()], [values, values], None, 0.1, sums) is None
    assert sum_changes_in_c([values], [values * 2, values * 3], [values, values.clone()], 0.0, sums) == 0


@needs_c
def test_denormal_numbers_are_counted_and_subtracted() -> None:
    for dtype, tiny in ((torch.float32, 2.0**-149), (torch.bfloat16, 2.0**-133), (torch.float64, 2.0**-1074)):
        left, right = torch.tensor([tiny, 1.0], dtype=dtype), torch.tensor([-tiny, 1.0], dtype=dtype)
        found = sum_pair_in_c(left, right, [0.0] * 4)
        assert found is not None
        assert (found.max_ulp, found.max_abs, found.worst) == (2, 2 * tiny, 0)


def test_a_change_that_overflows_and_is_left_out_adds_nothing_in_both_ways() -> None:
    old = torch.tensor([0.5, 0.5, 0.5, -1.7e308], dtype=torch.float64)
    new = torch.tensor([1.0, 2.0, 3.0, 1.7e308], dtype=torch.float64)
    other = torch.tensor([1.0, 2.5, 3.0, 1.7e308], dtype=torch.float64)
    gradients = torch.ones(4, dtype=torch.float64), torch.tensor([1.0, 1.0, 1.0, 5.0], dtype=torch.float64)
    found = [sum_changes((old, old), (new, other), gradients, 0.05, is_same_before=True)]
    with without_c():
        found.append(sum_changes((old, old), (new, other), gradients, 0.05, is_same_before=True))
    for changes in found:
        assert (changes.squares[:2], changes.num_excluded) == ([0.25, 8.75], 1)
