from __future__ import annotations

import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mock_scheduler.comparison.explain.locality import find_localities, parameter_dims
from mock_scheduler.comparison.residuals import Locality
from mock_scheduler.trace.entries import DimName
from mock_scheduler.verdict.wording.residuals import describe_locality


def noisy_pair(*shape: int, noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random values whose columns have different sizes, and the same with noise relative to each."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-2, 2, shape[-1], dtype=torch.float64)
    left = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
    return left, left + noise * scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def parts_of(found: tuple[Locality, ...]) -> list[tuple[DimName, int, int]]:
    return [(item.dim, item.first, item.last) for item in found]


def test_one_token_in_thousands_is_found_where_the_whole_differs_by_little() -> None:
    """A relative difference of the whole below 1e-3 passes for rounding, though one token is off by 4 %."""
    baseline, candidate = noisy_pair(4096, 16, noise=1e-4)
    candidate[2017] += 0.04 * baseline[2017]
    assert float((candidate - baseline).norm() / baseline.norm()) < 1e-3
    (found,) = find_localities(baseline, candidate, dims=("token", "channel"))
    energy = (candidate - baseline).square()
    share = float(energy[2017].sum() / energy.sum())
    assert found == Locality(
        dim="token",
        first=2017,
        last=2017,
        share=pytest.approx(share),
        num_indices=1,
        dim_size=4096,
    )
    assert describe_locality(found) == f"token 2,017 holds {100 * share:.1f} % of the difference (1 of 4,096 tokens)"


def test_neighbouring_tokens_are_one_locality() -> None:
    baseline, candidate = noisy_pair(4096, 8, noise=1e-6)
    candidate[40:56] *= 1.01
    (found,) = find_localities(baseline, candidate, dims=("token", "channel"))
    assert describe_locality(found) == "tokens 40 to 55 hold 100.0 % of the difference (16 of 4,096 tokens)"
    assert (found.first, found.last, found.fraction) == (40, 55, 16 / 4096)


def test_one_head_is_found_among_tokens_and_channels_that_share_its_difference() -> None:
    baseline, candidate = noisy_pair(64, 8, 16, noise=1e-3)
    candidate[:, 3] = baseline[:, 3] * (1.0 + 0.1)
    found = find_localities(baseline, candidate, dims=("token", "head", "channel"))
    assert parts_of(found) == [("head", 3, 3)]
    assert re.fullmatch(r"head 3 holds 99\.\d % of the difference \(1 of 8 heads\)", describe_locality(found[0]))


def test_one_head_of_one_token_is_found_in_both_dimensions() -> None:
    baseline = torch.ones(64, 8, 16)
    candidate = baseline.clone()
    candidate[7, 2] = 2.0
    assert parts_of(find_localities(baseline, candidate, dims=("token", "head", "channel"))) == [
        ("token", 7, 7),
        ("head", 2, 2),
    ]


def test_one_vocabulary_row_is_found_where_most_rows_are_zero() -> None:
    """The gradient of an embedding has rows of tokens that the batch does not have, equal to the last bit."""
    baseline, candidate = noisy_pair(1000, 8, noise=1e-6)
    absent = torch.arange(1000) % 4 != 1
    baseline[absent] = candidate[absent] = 0.0
    assert find_localities(baseline, candidate, dims=("vocab", "channel")) == ()
    candidate[17] = 0.0
    (found,) = find_localities(baseline, candidate, dims=("vocab", "channel"))
    assert describe_locality(found) == "vocabulary row 17 holds 100.0 % of the difference (1 of 1,000 vocabulary rows)"


def test_a_difference_where_the_baseline_is_zero_is_found() -> None:
    baseline, candidate = noisy_pair(128, 4, noise=1e-6)
    baseline[5] = 0.0
    assert parts_of(find_localities(baseline, candidate, dims=("expert", "channel"))) == [("expert", 5, 5)]


@pytest.mark.parametrize("rest", [0.0, 1e-6])
def test_half_of_the_rows_are_named_as_the_piece_of_one_rank(rest: float) -> None:
    baseline, candidate = noisy_pair(64, 32, noise=rest)
    candidate[32:] *= 0.5
    (found,) = find_localities(baseline, candidate, dims=("row", "column"), boundaries={0: [0, 32]})
    assert (
        describe_locality(found)
        == "rows 32 to 63 hold 100.0 % of the difference (32 of 64 rows): just the piece of one rank"
    )
    (found,) = find_localities(baseline, candidate, dims=("row", "column"))
    assert describe_locality(found) == "rows 32 to 63 hold 100.0 % of the difference (32 of 64 rows)"


def test_a_piece_that_differs_by_noise_of_another_size_is_found_as_a_whole() -> None:
    """Index by index such noise is sometimes no larger than elsewhere."""
    baseline, candidate = noisy_pair(256, 1, noise=1e-6)
    candidate[96:128] += 1e-4 * noisy_pair(32, 1, noise=0.0, seed=3)[0]
    boundaries = {0: list(range(0, 256, 32))}
    (found,) = find_localities(baseline, candidate, dims=("token", "channel"), boundaries=boundaries)
    assert describe_locality(found).endswith("(32 of 256 tokens): just the piece of one rank")
    assert (found.first, found.last) == (96, 127)
    assert found.share == pytest.approx(1.0, abs=5e-3)


def test_one_token_in_the_piece_of_a_rank_is_not_taken_for_the_whole_piece() -> None:
    baseline, candidate = noisy_pair(64, 8, noise=1e-6)
    candidate[27] = 0.0
    boundaries = {0: [0, 16, 32, 48]}
    assert parts_of(find_localities(baseline, candidate, dims=("token", "channel"), boundaries=boundaries)) == [
        ("token", 27, 27)
    ]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (slice(32, 33), "token 32 holds 100.0 % of the difference (1 of 64 tokens): from where a rank's piece begins"),
        (
            slice(30, 32),
            "tokens 30 to 31 hold 100.0 % of the difference (2 of 64 tokens): up to where a rank's piece ends",
        ),
        (slice(0, 1), "token 0 holds 100.0 % of the difference (1 of 64 tokens)"),
        (slice(63, 64), "token 63 holds 100.0 % of the difference (1 of 64 tokens)"),
    ],
)
def test_tokens_at_the_boundary_of_a_chunk_are_said_to_be_there(part: slice, text: str) -> None:
    baseline, candidate = noisy_pair(64, 8, noise=1e-7)
    candidate[part] = 0.0
    (found,) = find_localities(baseline, candidate, dims=("token", "channel"), boundaries={0: [0, 16, 32, 48]})
    assert describe_locality(found) == text


def test_tokens_far_apart_are_one_locality() -> None:
    baseline, candidate = noisy_pair(4096, 8, noise=1e-6)
    candidate[3:4000:100] *= 1.5
    (found,) = find_localities(baseline, candidate, dims=("token", "channel"))
    assert describe_locality(found) == "40 of 4,096 tokens, between 3 and 3,903, hold 100.0 % of the difference"
    assert (found.first, found.last, found.fraction) == (3, 3903, 40 / 4096)


def test_only_present_tokens_count() -> None:
    baseline, candidate = noisy_pair(256, 8, noise=1e-6)
    present = torch.ones(256, 1, dtype=torch.bool)
    candidate[9], present[9] = torch.nan, False
    assert find_localities(baseline, candidate, dims=("token", "channel"), present=present) == ()
    candidate[10] = 0.0
    found = find_localities(baseline, candidate, dims=("token", "channel"), present=present)
    assert parts_of(found) == [("token", 10, 10)]


def test_tensors_larger_than_a_chunk_are_summed_over_all_of_it() -> None:
    baseline, candidate = noisy_pair(3, 400, 512, noise=1e-6)
    candidate[2, 399, 511] += 1e6
    found = find_localities(baseline, candidate, dims=("expert", "row", "column"))
    assert parts_of(found) == [("expert", 2, 2), ("row", 399, 399), ("column", 511, 511)]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    shape=st.sampled_from([(2000,), (40,), (64, 8), (8, 8, 16), (2, 512), (512, 2), (7, 5)]),
    noise=st.sampled_from([1e-9, 1e-4, 1e-2]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_random_noise_has_no_place(seed: int, shape: tuple[int, ...], noise: float, dtype: torch.dtype) -> None:
    # Noise far below the rounding of storing may change one element alone, and that is a place.
    assume(noise > 1e-8 or dtype is torch.float64)
    baseline, candidate = (side.to(dtype) for side in noisy_pair(*shape, noise=noise, seed=seed))
    dims: tuple[DimName, ...] = ("token", "head", "channel")
    boundaries = {0: [0, shape[0] // 2]}
    assert find_localities(baseline, candidate, dims=dims[: len(shape)], boundaries=boundaries) == ()


def test_few_elements_that_were_rounded_otherwise_have_no_place() -> None:
    """In bfloat16 another order of a sum changes some elements by one unit, and leaves all others equal."""
    baseline = noisy_pair(4096, noise=0.0)[0].bfloat16()
    candidate = baseline.clone()
    candidate.view(torch.int16)[torch.arange(0, 4096, 37)] += 1
    assert find_localities(baseline, candidate, dims=("channel",)) == ()


def test_equal_and_small_tensors_have_no_place() -> None:
    assert find_localities(torch.ones(64), torch.ones(64), dims=("channel",)) == ()
    assert find_localities(torch.ones(4), torch.tensor([1.0, 1.0, 1.5, 1.0]), dims=("channel",)) == ()
    assert find_localities(torch.tensor(1.0), torch.tensor(2.0), dims=()) == ()


def test_dims_that_do_not_fit_are_refused() -> None:
    message = "dims ['token'] do not name the dimensions of shape [2, 3]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        find_localities(torch.ones(2, 3), torch.ones(2, 3), dims=("token",))


@pytest.mark.parametrize(
    ("name", "shape", "dims"),
    [
        ("embedding.word_embeddings.weight", (128, 64), ("vocab", "channel")),
        ("embedding.position_embeddings.weight", (128, 64), ("row", "channel")),
        ("output_layer.weight", (128, 64), ("vocab", "channel")),
        ("critic.output_layer.weight", (1, 64), ("row", "column")),
        ("critic.output_layer.bias", (1,), ("row",)),
        ("decoder.layers.0.input_layernorm.weight", (64,), ("channel",)),
        ("decoder.layers.0.self_attention.q_layernorm.weight", (16,), ("channel",)),
        ("decoder.final_layernorm.bias", (64,), ("channel",)),
        ("decoder.layers.0.self_attention.linear_qkv.weight", (96, 64), ("row", "column")),
        ("decoder.layers.0.self_attention.linear_qkv.bias", (96,), ("row",)),
        ("decoder.layers.0.mlp.router.weight", (4, 64), ("expert", "channel")),
        ("decoder.layers.0.mlp.router.expert_bias", (4,), ("expert",)),
        ("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight.exp_avg", (192, 64), ("row", "column")),
        ("scale", (), ()),
    ],
)
def test_dimensions_of_parameters_are_named(name: str, shape: tuple[int, ...], dims: tuple[DimName, ...]) -> None:
    assert parameter_dims(name, shape) == dims
