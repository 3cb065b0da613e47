"""Ratios that rounding nearly hides: found where all that they leave is rounding, and not where noise is like one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mock_scheduler.comparison.explain.ratios import CommonScale, find_common_scale
from mock_scheduler.comparison.explain.residual import classify_residual
from mock_scheduler.comparison.measure.figures import compute_figures
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.verdict.wording.residuals import describe_residual, format_ratio


def values(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (1.03, "candidate is 1.030 times the baseline"),
        (1.01, "candidate is 1.010 times the baseline"),
        (0.997, "candidate is 0.997 times the baseline but for rounding"),
        (1.003, "candidate is 1.003 times the baseline but for rounding"),
    ],
)
def test_a_ratio_below_the_rounding_of_bfloat16_is_found(scale: float, text: str) -> None:
    exact = values(4096)
    found = classify_residual(exact.bfloat16(), (scale * exact).bfloat16())
    assert found is not None
    assert (found.kind, describe_residual(found)) == ("ratio", text)
    assert found.value == pytest.approx(scale, abs=2e-4)


def test_rounding_in_bfloat16_is_no_ratio() -> None:
    exact = values(4096)
    for seed in range(1, 6):
        noisy = exact * (1.0 + 3e-3 * values(4096, seed=seed))
        assert classify_residual(exact.bfloat16(), noisy.bfloat16()) is None


def test_a_ratio_of_half_the_tensor_is_none() -> None:
    exact = values(4096)
    scaled = torch.cat([exact[:2048], 1.03 * exact[2048:]])
    assert classify_residual(exact.bfloat16(), scaled.bfloat16()) is None


def test_what_is_left_within_the_bound_of_noise_leaves_a_ratio() -> None:
    """Of ||a - b||² = 0.03² + 0.02², the ratio accounts for 9 / 13; the bound lets the rest pass or not."""
    baseline = values(4096).double()
    orthogonal = values(4096, seed=1).double()
    orthogonal -= baseline * (orthogonal.dot(baseline) / baseline.dot(baseline))
    candidate = 1.03 * baseline + 0.02 * baseline.norm() / orthogonal.norm() * orthogonal
    found = classify_residual(baseline, candidate, bound=0.021)
    assert found is not None
    assert describe_residual(found) == "candidate is 1.03 times the baseline but for noise"
    assert classify_residual(baseline, candidate, bound=0.019) is None


def test_zeros_below_the_rounding_of_bfloat16_are_found() -> None:
    """The last of eight micro-batches, which has small gradients: 100 of 4096 elements, 0.5 % of the norm."""
    baseline = values(4096).bfloat16()
    baseline[:100] *= 0.03
    candidate = baseline.clone()
    candidate[:100] = 0.0
    found = classify_residual(baseline, candidate)
    assert found is not None
    assert (found.kind, describe_residual(found)) == ("zeroed", "candidate is zero in 100 elements of 4,096")


def gradient(name: str, slope: float, seed: int) -> TensorDifference:
    baseline = values(64, seed)
    figures = compute_figures(baseline, slope * baseline)
    key = TraceKey(step=0, update=0, kind="gradient", name=name)
    return TensorDifference(
        key=key,
        num_elements=64,
        bit_equal=False,
        max_abs=figures.max_abs,
        relative=figures.relative,
        tolerance=0.0,
        size=1.0,
        figures=figures,
    )


def test_the_scale_of_all_gradients_is_their_median() -> None:
    gradients = [gradient(f"w{seed}", 1.0005 + 1e-5 * (seed - 4), seed) for seed in range(9)]
    found = find_common_scale(gradients, step=0, update=0)
    assert found is not None
    # The median distance of 0, 1, 1, 2, 2, 3, 3, 4, 4 is 2, in units of 1e-5.
    assert (found.ratio, found.num_tensors) == (pytest.approx(1.0005, abs=1e-7), 9)
    assert found.error == pytest.approx(1.4826 * 1.2533 * 2e-5 / 3, rel=1e-2)
    assert find_common_scale(gradients, step=0, update=1) is None
    assert find_common_scale(gradients[:7], step=0, update=0) is None


def test_gradients_that_spread_about_1_have_no_scale() -> None:
    gradients = [gradient(f"w{seed}", 1.0 + 1e-3 * (seed - 4), seed) for seed in range(9)]
    assert find_common_scale(gradients, step=0, update=0) is None


def test_a_ratio_too_near_to_1_is_that_of_the_gradients() -> None:
    exact = values(256)
    sides = (exact.bfloat16(), (1.0005 * exact).bfloat16())
    assert classify_residual(*sides) is None
    common = CommonScale(ratio=1.0005, error=2e-5, num_tensors=27)
    found = classify_residual(*sides, common=common)
    assert found is not None
    assert describe_residual(found) == (
        "candidate is 1.0005 times the baseline but for rounding, as the median of the 27 gradients of the update is"
    )
    assert classify_residual(*sides, common=replace(common, ratio=1.01)) is None


@pytest.mark.parametrize(
    ("ratio", "error", "text"),
    [
        (1.0106, 3.8e-4, "1.01"),
        (1.0106, 1e-4, "1.011"),
        (1.00297, 4e-4, "1.003"),
        (1.00297, 2e-5, "1.0030"),
        (0.98, 1e-2, "0.98"),
        (1.0005, 0.0, "1.0005000"),
        (1.0005, 1e-12, "1.0005000"),
        (0.5, 1e-3, "0.500"),
        (0.0625, 0.0, "0.0625"),
    ],
)
def test_a_ratio_has_the_digits_that_its_error_leaves(ratio: float, error: float, text: str) -> None:
    assert format_ratio(ratio, error) == text
