from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.comparison.measure.figures import compute_figures
from mock_scheduler.comparison.tensors import Figures, WorstElement
from mock_scheduler.comparison.thresholds import CHUNK_ELEMENTS

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAN, INF = math.nan, math.inf


def random_pair(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(*shape, generator=generator)
    return left.to(dtype), (left + 0.01 * torch.randn(*shape, generator=generator)).to(dtype)


def test_all_figures_are_those_worked_out_by_hand() -> None:
    baseline, candidate = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[3.0, 2.0], [1.0, 0.0]])
    figures = compute_figures(baseline, candidate)
    assert figures == Figures(
        num_elements=4,
        num_different=2,
        max_abs=2.0,
        norm=math.sqrt(5.0),
        relative=math.sqrt(5.0) / 5.0,
        slope=17.0 / 25.0,  # (9 + 8) / (9 + 16)
        cosine=pytest.approx(17.0 / (5.0 * math.sqrt(14.0)), rel=1e-15),
        max_ulp=0x3F800000,  # from 0 to 1; from 4 to 2 it is 2**23
        worst=WorstElement(index=(0, 1), baseline=4.0, candidate=2.0),
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 5, CHUNK_ELEMENTS - 1, 2 * CHUNK_ELEMENTS + 3])
def test_figures_of_any_dtype_and_size_are_those_of_a_plain_computation(dtype: torch.dtype, size: int) -> None:
    baseline, candidate = random_pair(size, dtype=dtype)
    figures = compute_figures(baseline, candidate)
    left, right = baseline.double().numpy(), candidate.double().numpy()
    difference = np.abs(left - right)
    assert figures.num_different == np.count_nonzero(left != right)
    assert figures.max_abs == difference.max()
    assert figures.norm == pytest.approx(np.sqrt(np.sum(difference**2)), rel=1e-12)
    assert figures.relative == pytest.approx(np.linalg.norm(left - right) / np.linalg.norm(left), rel=1e-12)
    assert figures.slope == pytest.approx(np.sum(left * right) / np.sum(left * left), rel=1e-12)
    norms = np.linalg.norm(left) * np.linalg.norm(right)
    assert figures.cosine == pytest.approx(np.sum(left * right) / norms, rel=1e-12)
    if figures.num_different:
        place = int(difference.argmax())
        assert figures.worst == WorstElement(index=(place,), baseline=left[place], candidate=right[place])


def test_equal_tensors_differ_in_nothing_even_where_they_are_not_finite() -> None:
    values = torch.tensor([1.0, NAN, INF, -INF, -0.0])
    figures = compute_figures(values, values.clone())
    expected = Figures(
        num_elements=5, num_different=0, max_abs=0, norm=0, relative=0, slope=1, cosine=1, max_ulp=0, worst=None
    )
    assert figures == expected
    assert compute_figures(torch.empty(0, 3), torch.empty(0, 3)) == replace(expected, num_elements=0)


def test_elements_that_are_equal_but_not_finite_are_left_out_of_every_sum() -> None:
    figures = compute_figures(torch.tensor([NAN, INF, -INF, 3.0, 4.0]), torch.tensor([NAN, INF, -INF, 3.0, 5.0]))
    assert (figures.num_different, figures.max_abs, figures.norm, figures.relative) == (1, 1.0, 1.0, 0.2)
    assert (figures.slope, figures.max_ulp) == (29.0 / 25.0, 1 << 21)
    assert figures.worst == WorstElement(index=(4,), baseline=4.0, candidate=5.0)


def test_equal_chunks_with_infinity_are_left_out_of_every_sum() -> None:
    baseline = torch.zeros(CHUNK_ELEMENTS + 1)
    baseline[:2] = torch.tensor([INF, 2.0])
    candidate = baseline.clone()
    candidate[-1] = 1.0
    assert compute_figures(baseline, candidate).relative == 0.5


@pytest.mark.parametrize(("left", "right"), [(NAN, 1.0), (1.0, INF), (INF, -INF)])
def test_what_is_not_finite_on_one_side_only_is_infinitely_far(left: float, right: float) -> None:
    figures = compute_figures(torch.tensor([1.0, left]), torch.tensor([1.0, right]))
    assert (figures.num_different, figures.max_abs, figures.norm, figures.relative) == (1, INF, INF, INF)
    assert (figures.slope, figures.cosine) == (1.0, 1.0)
    assert figures.worst is not None
    assert figures.worst.index == (1,)


def test_zero_against_minus_zero_differs_in_bits_alone() -> None:
    figures = compute_figures(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, -0.0]))
    assert (figures.num_different, figures.max_abs, figures.max_ulp) == (1, 0.0, 0)
    assert figures.worst is not None
    assert (figures.worst.index, math.copysign(1.0, figures.worst.candidate)) == ((2,), -1.0)


def test_nans_of_other_bits_differ() -> None:
    baseline = torch.tensor([0x7FC00000, 0], dtype=torch.int32).view(torch.float32)
    candidate = torch.tensor([0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
    assert compute_figures(baseline, candidate).num_different == 1


@pytest.mark.parametrize(
    ("baseline", "candidate", "figures"),
    [
        ([0.0, 0.0], [0.0, 0.0], (0.0, 1.0, 1.0)),
        ([0.0, 0.0], [1.0, 0.0], (INF, INF, 0.0)),
        ([1.0, 0.0], [0.0, 0.0], (1.0, 0.0, 0.0)),
        ([1.0, 0.0], [-1.0, 0.0], (2.0, -1.0, -1.0)),
        ([1.0, 2.0], [2.0, 4.0], (1.0, 2.0, 1.0)),
        ([1.0, 0.0], [0.0, 1.0], (math.sqrt(2.0), 0.0, 0.0)),
    ],
)
def test_relative_slope_and_cosine_of_special_pairs(
    baseline: list[float], candidate: list[float], figures: tuple[float, float, float]
) -> None:
    found = compute_figures(torch.tensor(baseline), torch.tensor(candidate))
    assert (found.relative, found.slope) == figures[:2]
    assert found.cosine == pytest.approx(figures[2], rel=1e-15)


TINY = {torch.float64: 2.0**-1074, torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_distance_in_representable_numbers_is_exact(dtype: torch.dtype) -> None:
    eps, tiny, bits = torch.finfo(dtype).eps, TINY[dtype], torch.finfo(dtype).bits
    largest = torch.finfo(dtype).max
    # The largest number is the one before infinity, whose bits are all ones in the exponent and zeros after it.
    mantissa = round(-math.log2(eps))
    num_finite = (1 << (bits - 1)) - (1 << mantissa) - 1
    pairs = {
        (1.0, 1.0 + eps): 1,
        (1.0, 1.0 - eps / 2): 1,  # the spacing halves below a power of two
        (1.0, 2.0): 1 << mantissa,
        (-2.0, -8.0): 2 << mantissa,
        (0.0, tiny): 1,
        (-0.0, tiny): 1,
        (-tiny, tiny): 2,
        (-tiny, 3 * tiny): 4,
        (0.0, -0.0): 0,
        (0.0, largest): num_finite,
        (-largest, largest): 2 * num_finite,
    }
    for (left, right), distance in pairs.items():
        # Beside it a pair of one sign and a smaller distance, and an equal one.
        baseline = torch.tensor([1.0, left, 1.0], dtype=dtype)
        candidate = torch.tensor([1.0, right, 1.0], dtype=dtype)
        assert compute_figures(baseline, candidate).max_ulp == distance, (left, right)
        assert compute_figures(candidate, baseline).max_ulp == distance, (right, left)


@given(
    pairs=st.lists(
        st.tuples(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 2), min_size=1, max_size=20
    )
)
def test_the_largest_distance_is_that_of_the_ordered_bit_patterns(pairs: list[tuple[float, float]]) -> None:
    sides = [np.array(values, dtype=np.float32) for values in zip(*pairs, strict=True)]
    ordered = [
        [-(int(bits) & 0x7FFFFFFF) if bits >> 31 else int(bits) for bits in side.view(np.uint32)] for side in sides
    ]
    expected = max(abs(left - right) for left, right in zip(*ordered, strict=True))
    assert compute_figures(*(torch.from_numpy(side) for side in sides)).max_ulp == expected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_integers_have_no_units_in_the_last_place(dtype: torch.dtype) -> None:
    figures = compute_figures(torch.tensor([0, 100], dtype=dtype), torch.tensor([3, 104], dtype=dtype))
    assert (figures.num_different, figures.max_abs, figures.norm, figures.max_ulp) == (2, 4.0, 5.0, None)
    assert figures.worst == WorstElement(index=(1,), baseline=100.0, candidate=104.0)


def test_large_integers_are_subtracted_exactly() -> None:
    largest = 2**63 - 1
    baseline, candidate = torch.tensor([2**60, largest]), torch.tensor([2**60 + 1, largest])
    assert compute_figures(baseline, candidate).max_abs == 1.0
    assert compute_figures(torch.tensor([largest]), torch.tensor([-largest])).max_abs == 2.0**64


def test_masks_are_compared_as_zeros_and_ones() -> None:
    figures = compute_figures(torch.tensor([True, False, True]), torch.tensor([True, True, False]))
    assert (figures.num_different, figures.max_abs, figures.max_ulp) == (2, 1.0, None)


def test_a_scalar_has_an_empty_index() -> None:
    figures = compute_figures(torch.tensor(2.0), torch.tensor(1.0))
    assert (figures.num_elements, figures.relative, figures.slope) == (1, 0.5, 0.5)
    assert figures.worst == WorstElement(index=(), baseline=2.0, candidate=1.0)
    assert compute_figures(torch.tensor(2.0), torch.tensor(1.0), present=torch.tensor(False)).num_elements == 0


def test_tensors_that_are_not_contiguous_are_compared_by_index() -> None:
    baseline, candidate = random_pair(6, 5)
    assert (
        compute_figures(baseline.T, candidate.T).worst
        == compute_figures(baseline.T.contiguous(), candidate.T.contiguous()).worst
    )


@pytest.mark.parametrize("columns", [1, 3, CHUNK_ELEMENTS // 2, CHUNK_ELEMENTS + 1])
@pytest.mark.parametrize("whole", [False, True], ids=["by row", "by element"])
def test_only_present_elements_count(columns: int, whole: bool) -> None:
    baseline, candidate = random_pair(7, columns)
    rows = torch.tensor([True, False, True, True, False, False, True])
    candidate[1], candidate[5, 0] = NAN, 1e9
    figures = compute_figures(baseline, candidate, present=rows[:, None].expand(7, columns) if whole else rows[:, None])
    expected = compute_figures(baseline[rows], candidate[rows])
    assert expected.worst is not None
    row, column = expected.worst.index
    worst = replace(expected.worst, index=([0, 2, 3, 6][row], column))
    assert (figures.num_elements, figures.num_different, figures.max_ulp) == (
        4 * columns,
        expected.num_different,
        expected.max_ulp,
    )
    assert (figures.max_abs, figures.worst) == (expected.max_abs, worst)
    for name in ("norm", "relative", "slope", "cosine"):
        assert getattr(figures, name) == pytest.approx(getattr(expected, name), rel=1e-12)


def test_nothing_present_is_nothing_compared() -> None:
    figures = compute_figures(torch.ones(4, 2), torch.zeros(4, 2), present=torch.zeros(4, 1, dtype=torch.bool))
    assert (figures.num_elements, figures.num_different, figures.relative, figures.worst) == (0, 0, 0.0, None)


@pytest.mark.parametrize(
    ("present", "found"),
    [
        (torch.ones(3, dtype=torch.bool), "torch.bool of shape [3]"),
        (torch.ones(1, 2, dtype=torch.bool), "torch.bool of shape [1, 2]"),
        (torch.ones(3, 1), "torch.float32 of shape [3, 1]"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(present: torch.Tensor, found: str) -> None:
    message = (
        f"present is {found}; a mask of a tensor of shape [3, 2] is bool and has its shape, or its leading dimensions "
        "with ones after them"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        compute_figures(torch.ones(3, 2), torch.zeros(3, 2), present=present)


@pytest.mark.parametrize(
    "candidate", [torch.ones(3, 1), torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.complex64)]
)
def test_tensors_that_cannot_be_subtracted_are_refused(candidate: torch.Tensor) -> None:
    message = (
        f"cannot subtract {candidate.dtype} of shape {list(candidate.shape)} from torch.float32 of shape [3]: both "
        "must have one shape and one dtype, which is not complex"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        compute_figures(torch.ones(3), candidate)
