from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mock_scheduler.comparison.explain.ratios import name_factor
from mock_scheduler.comparison.explain.residual import classify_residual
from mock_scheduler.comparison.residuals import Residual, ResidualKind
from mock_scheduler.verdict.wording.residuals import describe_residual

LAYOUT = {"tp": 2, "dp": 4, "micro-batches": 8}


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(tensor: torch.Tensor, *, relative: float = 1e-5, seed: int = 9) -> torch.Tensor:
    """The same with the noise of another order of sums."""
    return tensor + relative * values(*tensor.shape, seed=seed)


def check(found: Residual | None, kind: ResidualKind, value: float, text: str) -> None:
    assert found is not None
    assert (found.kind, describe_residual(found)) == (kind, text)
    assert found.value == pytest.approx(value, rel=1e-4)
    assert found.explained == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (2.0, "candidate is 2.000 times the baseline: tp"),
        (0.25, "candidate is 0.250 times the baseline: 1/dp"),
        (8.0, "candidate is 8.000 times the baseline: micro-batches"),
        (2.0**0.5, "candidate is 1.414 times the baseline: √tp"),
        (1 / 16, "candidate is 0.0625 times the baseline: 1/(tp × micro-batches)"),
        (1.03, "candidate is 1.030 times the baseline"),
        (0.999, "candidate is 0.9990000 times the baseline"),
        (-2.0, "candidate is -2.000 times the baseline"),
    ],
)
def test_a_ratio_is_found_and_named(ratio: float, text: str) -> None:
    baseline = values(32, 16)
    found = classify_residual(baseline, rounded(baseline * ratio, relative=1e-7), layout=LAYOUT)
    check(found, "ratio", ratio, text)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (2.0, "tp or cp"),
        (0.5, "1/tp or 1/cp"),
        (3.0, "dp"),
        (6.0, "tp × dp or cp × dp"),
        (1.5, "dp/tp or dp/cp"),
        (3.0**0.5, "√dp"),
        (1 / 1.3, "1/tokens ratio"),
        (2.02, None),
        (1.0, None),
        (0.0, None),
    ],
)
def test_factors_are_the_simplest_numbers_of_the_layout(value: float, name: str | None) -> None:
    assert name_factor(value, {"tp": 2, "cp": 2, "pp": 1, "dp": 3, "tokens ratio": 1.3}) == name


def test_a_ratio_of_a_scalar_is_found_where_it_is_one_of_the_layout() -> None:
    norm = torch.tensor(0.731)
    found = classify_residual(norm, norm * 2, layout=LAYOUT)
    assert found is not None
    assert describe_residual(found) == "candidate is 2.000 times the baseline: tp"
    assert classify_residual(norm, norm * 1.7, layout=LAYOUT) is None
    assert classify_residual(norm, norm * 1.002, layout=LAYOUT) is None


def test_a_ratio_that_rests_on_one_large_element_is_none() -> None:
    baseline = values(64)
    baseline[3] = 1e4
    candidate = rounded(baseline, relative=1e-3)
    candidate[3] = 1.003e4
    assert classify_residual(baseline, candidate) is None


def test_other_signs_and_zeros_are_found() -> None:
    baseline = values(32, 16)
    check(classify_residual(baseline, -baseline), "sign", -1, "candidate is the baseline with its sign reversed")
    zeros = torch.zeros_like(baseline)
    check(classify_residual(baseline, zeros), "zeroed", 0, "candidate is zero, baseline is not")
    check(classify_residual(zeros, baseline), "zeroed", 0, "baseline is zero, candidate is not")


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("zeroed", 0.0, "candidate is zero in 128 elements of 512"),
        ("doubled part", 2.0, "candidate is twice the baseline in 128 elements of 512"),
        ("sign", -1.0, "candidate is the baseline with its sign reversed in 128 elements of 512"),
        ("ratio", 0.5, "candidate is half the baseline in 128 elements of 512"),
    ],
)
def test_a_part_of_the_tensor_that_is_a_multiple_is_found(kind: ResidualKind, value: float, text: str) -> None:
    baseline = values(32, 16)
    candidate = rounded(baseline, relative=1e-6)
    candidate[8:16] = value * baseline[8:16]
    check(classify_residual(baseline, candidate), kind, value, text)


def test_a_part_that_only_the_baseline_lacks_is_found() -> None:
    candidate = values(32, 16)
    baseline = rounded(candidate, relative=1e-6)
    baseline[8:16] = 0.0
    text = "baseline is zero, candidate is not, in 128 elements of 512"
    check(classify_residual(baseline, candidate), "zeroed", 0.0, text)


@pytest.mark.parametrize(
    ("kind", "subset", "text"),
    [
        ("missing part", [1], "part 1 of 4 is missing from the candidate"),
        ("missing part", [0, 3], "parts 0, 3 of 4 are missing from the candidate"),
        ("doubled part", [2], "part 2 of 4 is in the candidate once more"),
    ],
)
def test_partial_sums_that_are_missing_or_added_twice_are_named(
    kind: ResidualKind, subset: list[int], text: str
) -> None:
    parts = values(4, 16, 8)
    baseline = parts.sum(0)
    sign = -1.0 if kind == "missing part" else 1.0
    candidate = rounded(baseline + sign * parts[subset].sum(0))
    check(classify_residual(baseline, candidate, parts=list(parts), layout=LAYOUT), kind, sign, text)
    assert classify_residual(baseline, rounded(baseline, relative=1e-2), parts=list(parts)) is None


def test_of_many_parts_single_ones_and_pairs_are_tried() -> None:
    parts = values(12, 16, 8)
    baseline = parts.sum(0)
    found = classify_residual(baseline, baseline - parts[3] - parts[11], parts=list(parts))
    check(found, "missing part", -1.0, "parts 3, 11 of 12 are missing from the candidate")


def test_a_stale_tensor_is_found() -> None:
    previous = values(32, 16)
    baseline = previous + 1e-3 * values(32, 16, seed=1)
    text = "candidate is the baseline's tensor of the update before"
    check(classify_residual(baseline, previous, previous=previous), "stale", 1.0, text)
    assert classify_residual(baseline, rounded(baseline), previous=previous) is None
    assert classify_residual(baseline, baseline + 1e-3 * values(32, 16, seed=2), previous=previous) is None
    scalar = torch.tensor(0.5)
    check(classify_residual(torch.tensor(0.7), scalar, previous=scalar), "stale", 1.0, text)
    assert classify_residual(torch.tensor(0.7), torch.tensor(0.51), previous=scalar) is None


def test_a_constant_offset_is_found() -> None:
    baseline = values(32, 16)
    check(classify_residual(baseline, baseline + 0.25), "constant", 0.25, "candidate is the baseline plus 0.25")
    check(classify_residual(baseline, baseline - 0.25), "constant", -0.25, "candidate is the baseline minus 0.25")


def test_one_element_is_found() -> None:
    baseline = values(32, 16)
    candidate = baseline.clone()
    candidate[3, 5] = baseline[3, 5] + 0.5
    check(classify_residual(baseline, candidate), "one element", 0.5, "one of 512 elements differs, by 0.5")
    candidate = rounded(candidate, relative=1e-6)
    found = classify_residual(baseline, candidate)
    assert found is not None
    assert describe_residual(found) == f"one of 512 elements holds 100.0 % of the difference: {found.value:.6g}"
    assert found.value == pytest.approx(0.5, abs=1e-5)


def test_one_element_is_found_among_others_that_are_rounded_otherwise() -> None:
    baseline = values(32, 16).to(torch.bfloat16)
    candidate = rounded(baseline.double(), relative=1e-4).to(torch.bfloat16)
    assert int((baseline != candidate).sum()) > 1
    assert classify_residual(baseline, candidate) is None
    candidate[3, 5] = baseline[3, 5] + 0.5
    found = classify_residual(baseline, candidate)
    assert found is not None
    assert (found.kind, found.value) == ("one element", pytest.approx(0.5, rel=0.02))


def test_one_bit_of_one_element_is_found() -> None:
    baseline = values(32, 16)
    candidate = baseline.clone()
    candidate.view(torch.int32)[3, 5] += 1
    found = classify_residual(baseline, candidate)
    assert found is not None
    assert (found.kind, found.explained) == ("one element", 1.0)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shift", [1, -1, 3])
def test_a_shift_along_a_dimension_is_found(dim: int, shift: int) -> None:
    baseline = values(40, 24)
    candidate = rounded(baseline.roll(shift, dim))
    found = classify_residual(baseline, candidate, dims=("token", "channel"))
    noun = ("tokens", "channels")[dim]
    check(found, "shift", shift, f"candidate is the baseline shifted by {shift:+d} along the {noun}")


def test_a_shifted_mask_and_shifted_tokens_are_found() -> None:
    mask = values(64) > 0
    found = classify_residual(mask, mask.roll(1))
    check(found, "shift", 1, "candidate is the baseline shifted by +1 along the indices of dimension 0")
    tokens = torch.arange(64) * 37 % 101
    found = classify_residual(tokens, tokens.roll(-1), dims=("token",))
    check(found, "shift", -1, "candidate is the baseline shifted by -1 along the tokens")


def swap(tensor: torch.Tensor, first: slice, second: slice) -> torch.Tensor:
    swapped = tensor.clone()
    swapped[first], swapped[second] = tensor[second], tensor[first]
    return swapped


@pytest.mark.parametrize("noise", [0.0, 1e-5])
@pytest.mark.parametrize(
    ("order", "moved", "text"),
    [
        ("reversed", 64, "candidate has the rows of the baseline reversed"),
        ("halves", 64, "candidate has rows 0 to 31 and 32 to 63 of the baseline exchanged"),
        ("pieces", 32, "candidate has rows 16 to 31 and 48 to 63 of the baseline exchanged"),
        ("two", 2, "candidate has rows 5 and 60 of the baseline exchanged"),
        ("gated", 62, "candidate has rows of the baseline interleaved, one of each of its 2 parts in turn"),
        ("any", 63, "candidate has 63 of 64 rows of the baseline in another order"),
    ],
)
def test_rows_in_another_order_are_found(order: str, moved: int, text: str, noise: float) -> None:
    baseline = values(64, 24)
    candidate = {
        "reversed": baseline.flip(0),
        "halves": baseline.roll(32, 0),
        "pieces": swap(baseline, slice(16, 32), slice(48, 64)),
        "two": swap(baseline, slice(5, 6), slice(60, 61)),
        "gated": baseline.view(2, 32, 24).transpose(0, 1).reshape(64, 24),
        "any": baseline[torch.arange(64) * 27 % 64 ^ 4],
    }[order]
    if order == "any":
        moved = int((torch.arange(64) * 27 % 64 ^ 4 != torch.arange(64)).sum())
        text = text.replace("63", str(moved))
    found = classify_residual(baseline, rounded(candidate, relative=noise), layout={"tp": 4}, dims=("row", "column"))
    check(found, "permutation", moved, text)


def test_columns_and_elements_in_another_order_are_found() -> None:
    baseline = values(24, 64)
    found = classify_residual(baseline, rounded(baseline.roll(32, 1)), dims=("row", "column"))
    check(found, "permutation", 64, "candidate has columns 0 to 31 and 32 to 63 of the baseline exchanged")
    vector = values(64)
    found = classify_residual(vector, vector[torch.arange(64) ^ 1], dims=("channel",))
    check(found, "permutation", 64, "candidate has 64 of 64 channels of the baseline in another order")


def test_only_present_elements_count() -> None:
    baseline = values(64, 8)
    candidate = baseline * 2
    present = (torch.arange(64) % 3 > 0)[:, None]
    candidate[::3] = 1e6
    found = classify_residual(baseline, candidate, present=present, layout=LAYOUT)
    check(found, "ratio", 2.0, "candidate is 2.000 times the baseline: tp")
    candidate = torch.where(present, baseline + 0.5, torch.nan)
    found = classify_residual(baseline, candidate, present=present)
    check(found, "constant", 0.5, "candidate is the baseline plus 0.5")
    candidate = torch.where(present, baseline.roll(1, 0), torch.nan)
    found = classify_residual(baseline, candidate, present=present, dims=("token", "channel"))
    check(found, "shift", 1, "candidate is the baseline shifted by +1 along the tokens")


def test_of_a_large_tensor_evenly_spaced_elements_are_looked_at() -> None:
    baseline = values(5000, 1024)
    found = classify_residual(baseline, baseline * 2, layout=LAYOUT)
    check(found, "ratio", 2, "candidate is 2.000 times the baseline: tp (seen in 1,024,000 of 5,120,000 elements)")
    found = classify_residual(baseline, baseline.flip(0), dims=("row", "column"))
    assert found is not None
    assert (
        describe_residual(found)
        == "candidate has the rows of the baseline reversed (seen in 1,025,000 of 5,120,000 elements)"
    )


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**32),
    shape=st.sampled_from([(16,), (17,), (300,), (64, 8), (8, 8, 16), (2, 64), (1000, 2), (5, 7)]),
    noise=st.sampled_from([1e-9, 1e-6, 1e-4, 1e-2, 0.1, 1.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
@example(seed=1354, shape=(16,), noise=1e-4, dtype=torch.bfloat16)  # 3 elements differ, one holds 92 % of it
def test_random_noise_looks_like_nothing(seed: int, shape: tuple[int, ...], noise: float, dtype: torch.dtype) -> None:
    baseline, previous = values(*shape, seed=seed).to(dtype), values(*shape, seed=seed + 1).to(dtype)
    candidate = rounded(baseline.double(), relative=noise, seed=seed + 2).to(dtype)
    parts = list(values(3, *shape, seed=seed + 3))
    if int((baseline != candidate).sum()) == 1:
        return  # one element is what this is
    found = classify_residual(baseline, candidate, layout=LAYOUT, previous=previous, parts=parts)
    assert found is None


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 15), noise=st.sampled_from([1e-6, 1e-3, 0.05]))
def test_noise_of_few_elements_looks_like_nothing(seed: int, count: int, noise: float) -> None:
    baseline = values(count, seed=seed)
    candidate = baseline * (1.0 + noise * values(count, seed=seed + 1))
    if int((baseline != candidate).sum()) != 1 or count == 1:
        assert classify_residual(baseline, candidate, layout=LAYOUT) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_to_fewer_bits_looks_like_nothing(dtype: torch.dtype) -> None:
    """Even where it goes in one direction: what is cut off instead of rounded is smaller everywhere."""
    baseline = values(4096).abs().to(dtype)
    candidate = (baseline.view(torch.int16 if dtype is torch.bfloat16 else torch.int32) - 1).view(dtype)
    assert classify_residual(baseline, candidate, layout=LAYOUT) is None


def test_noise_that_nearly_equal_rows_share_is_no_permutation() -> None:
    """The rows of a gradient of rank one are multiples of each other: sorted, any noise of theirs is matched."""
    row = values(1, 16)
    baseline = values(1000, 1) * row
    candidate = baseline + 1e-2 * values(1000, 1, seed=1) * row
    assert classify_residual(baseline, candidate, layout=LAYOUT) is None


def test_equal_tensors_look_like_nothing() -> None:
    assert classify_residual(torch.ones(4), torch.ones(4)) is None


def test_what_the_update_before_left_in_a_buffer_is_named() -> None:
    """A gradient buffer was not cleared: its old values are in the next gradient, clipped and divided by its tokens."""
    gradient, before = values(1024, seed=1), values(1024, seed=2)
    found = classify_residual(gradient, gradient + 0.03 * before, previous=before)
    assert found is not None
    assert (found.kind, found.value) == ("left over", pytest.approx(0.03, rel=1e-4))
    assert describe_residual(found) == (
        "candidate is the baseline plus 0.03 times the tensor of the update before, as a buffer that was not cleared "
        "leaves it"
    )
    # A rank keeps the sum of its own shard, and its own part of the others' shards, which is then added once more.
    own, other = before, values(1024, seed=3)
    sharded = classify_residual(gradient, gradient + 0.03 * (own + 2 * other), previous=own + other)
    assert sharded is not None
    assert (sharded.kind, sharded.value) == ("left over", pytest.approx(0.045, rel=0.1))
    assert 0.75 < sharded.explained < 0.95
    assert classify_residual(gradient, gradient + 0.03 * (own + 2 * other), previous=own) is None
    # Where the update before is like this one, a ratio says it.
    ratio = classify_residual(gradient, 1.03 * gradient, previous=gradient * 1.01)
    assert ratio is not None
    assert ratio.kind == "ratio"
    assert classify_residual(gradient, gradient + 0.03 * values(1024, seed=3), previous=before) is None
    # The same rows were trained on again: both fit to the last bit.
    again = classify_residual(gradient, 2 * gradient, previous=gradient.clone())
    assert again is not None
    assert again.kind == "ratio"


@pytest.mark.parametrize(("extra", "words"), [(1e-4, "less"), (-1e-4, "more")])
def test_other_weight_decay_is_named(extra: float, words: str) -> None:
    change, start = 1e-3 * values(1024, seed=1), values(1024, seed=2)
    found = classify_residual(change, change + extra * start, start=start)
    assert found is not None
    assert describe_residual(found) == (
        f"candidate decays by 0.0001 of the parameter {words} than the baseline: weight decay"
    )
    # Half of the parameter is no decay.
    assert classify_residual(change, change + 0.5 * start, start=start) is None


def test_a_multiple_in_another_direction_is_no_ratio() -> None:
    """Most of the difference lies along the baseline, and the rest is a sixth of it: no one number makes that."""
    first, other = values(4096, seed=1), values(4096, seed=2)
    assert classify_residual(first, 1.57 * first + 0.5 * other) is None
    found = classify_residual(first, 1.57 * first + 0.01 * other)
    assert found is not None
    assert found.kind == "ratio"
