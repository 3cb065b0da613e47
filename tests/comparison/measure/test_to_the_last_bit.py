"""Every figure equals a plain computation to the last bit, of whatever bits the tensors are, in C and in NumPy."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.comparison.explain.narrowing import count_bits, stored_bits
from mock_scheduler.comparison.measure.changes import sum_changes
from mock_scheduler.comparison.measure.figures import sum_pair
from mock_scheduler.comparison.thresholds import BLOCK_ELEMENTS, CHUNK_ELEMENTS
from mock_scheduler.support.tensor_bytes import view_as_bits
from tests.comparison.measure.plain import plain_bits, plain_changes, plain_figures, without_c

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
KINDS = ("any bits", "close", "other signs", "not finite", "few")
DRAWS = st.tuples(st.integers(0, 2**31), st.integers(0, 200), st.sampled_from(DTYPES), st.sampled_from(KINDS))


def draw_pair(seed: int, size: int, dtype: torch.dtype, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        left, right = (torch.rand(size, generator=generator) < 0.5 for _ in range(2))
        return left, right
    if not dtype.is_floating_point:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        left, right = (torch.randint(low, high, (size,), generator=generator, dtype=dtype) for _ in range(2))
        return left, right
    if kind == "any bits":
        width = torch.finfo(dtype).bits
        ends = torch.iinfo(getattr(torch, f"int{width}"))
        bits = [torch.randint(ends.min, ends.max, (size,), generator=generator) for _ in range(2)]
        left, right = (each.to(getattr(torch, f"int{width}")).view(dtype) for each in bits)
        return left, right
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    left = values.to(dtype)
    if kind == "few":
        right = left.clone()
        right[size // 2 :: 7] = 1.0
        return left, right
    right = (values * (1 + 1e-3 * torch.randn(size, generator=generator, dtype=torch.float64))).to(dtype)
    chosen = torch.rand(size, generator=generator) < 0.1
    if kind == "other signs":
        right[chosen] = -right[chosen]
        left[::11], right[::11] = 0.0, -0.0
    if kind == "not finite":
        right[chosen] = math.inf
        left[::5] = math.nan
        right[::10] = left[::10]
    return left, right


def check(left: torch.Tensor, right: torch.Tensor, present: torch.Tensor | None = None) -> None:
    sums = sum_pair(left, right, present=present)
    with without_c():
        # As text, since a worst value may be NaN.
        assert repr(sum_pair(left, right, present=present)) == repr(sums)
    kept = None if present is None else present.expand(left.shape).reshape(-1)
    plain = plain_figures(left.reshape(-1), right.reshape(-1), kept)
    figures = sums.figures
    mine, product, other, difference = plain["squares"]
    assert (figures.num_different, sums.is_finite) == (plain["num_different"], plain["is_finite"])
    assert (figures.max_abs, figures.norm) == (plain["max_abs"], math.sqrt(difference))
    assert (sums.norm, sums.other_norm) == (math.sqrt(mine), math.sqrt(other))
    assert figures.max_ulp == (plain["max_ulp"] if left.is_floating_point() else None)
    if figures.num_different and mine:
        # Squares of float64 may overflow.
        slope = math.inf if math.isinf(product) else product / mine
        assert figures.slope == slope or (math.isnan(slope) and math.isnan(figures.slope))
        assert figures.worst is not None
        places = torch.arange(left.numel()) if kept is None else kept.nonzero().squeeze(1)
        assert figures.worst.index == tuple(
            int(each) for each in torch.unravel_index(places[int(plain["worst"])], left.shape)
        )


@given(draw=DRAWS)
@settings(deadline=None)
def test_figures_of_any_bits_are_those_of_a_plain_computation(draw: tuple[int, int, torch.dtype, str]) -> None:
    check(*draw_pair(*draw))


@given(draw=DRAWS, columns=st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_figures_of_some_rows_are_those_of_a_plain_computation(
    draw: tuple[int, int, torch.dtype, str], columns: int
) -> None:
    left, right = (side[: len(side) // columns * columns].view(-1, columns) for side in draw_pair(*draw))
    check(left, right, torch.rand(len(left), 1, generator=torch.Generator().manual_seed(draw[0])) < 0.7)


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.all) for kind in KINDS[1:4])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_figures_of_several_blocks_are_summed_in_their_order(
    dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = draw_pair(7, 5000, dtype, kind)
    size = BLOCK_ELEMENTS + CHUNK_ELEMENTS + 3
    left, right = (side.repeat(size // 5000 + 1)[:size] for side in (left, right))
    check(left, right)
    several = sum_pair(left, right)
    monkeypatch.setattr("mock_scheduler.comparison.measure.large_tensors.num_threads", lambda: 1)
    one = sum_pair(left, right)
    # As text, since a worst value may be NaN.
    assert repr(one) == repr(several)


@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(FLOATS), gradient=st.sampled_from((None, *FLOATS)))
@settings(deadline=None)
def test_changes_by_an_update_are_those_of_a_plain_computation(
    seed: int, dtype: torch.dtype, gradient: torch.dtype | None
) -> None:
    old, _ = draw_pair(seed, 150, dtype, "close")
    new = draw_pair(seed + 1, 150, dtype, "other signs")
    gradients = None if gradient is None else draw_pair(seed + 2, 150, gradient, "close")
    sums = sum_changes((old, old), new, gradients, 1e-3, is_same_before=True)
    found = (sums.distance, sums.size, sums.rounding, sums.num_excluded)
    assert found == plain_changes((old, old), new, gradients, 1e-3)
    with without_c():
        assert sum_changes((old, old), new, gradients, 1e-3, is_same_before=True) == sums
        assert sum_changes((old, old.clone()), new, gradients, 1e-3, is_same_before=False) == sums
    assert sum_changes((old, old.clone()), new, gradients, 1e-3, is_same_before=False) == sums


def test_gradients_of_two_dtypes_tell_elements_apart() -> None:
    old, new = draw_pair(1, 64, torch.float32, "close")
    wide, _ = draw_pair(2, 64, torch.float32, "close")
    narrow = wide.bfloat16()
    for pair in ((wide, narrow), (narrow, wide), (wide.double(), narrow), (narrow, wide.double())):
        sums = sum_changes((old, old), (new, new * 2), pair, 1e-3, is_same_before=True)
        assert sums.num_excluded == int(((wide - narrow.float()).abs() > wide.abs() * 1e-3).sum())


@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(FLOATS),
    kind=st.sampled_from(KINDS),
    num_cut=st.integers(0, 12),
    num_zeros=st.sampled_from((0, 3, CHUNK_ELEMENTS)),
)
@settings(deadline=None)
def test_bits_of_mantissa_are_those_of_a_plain_count(
    seed: int, dtype: torch.dtype, kind: str, num_cut: int, num_zeros: int
) -> None:
    values, _ = draw_pair(seed, 150, dtype, kind)
    bits = view_as_bits(values)
    values = torch.cat([torch.zeros(num_zeros, dtype=dtype), (bits & ~((1 << num_cut) - 1)).view(dtype)])
    assert count_bits(values) == plain_bits(values, stored_bits(dtype))
