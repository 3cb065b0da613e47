"""Sampling by inversion: which number draws which token, and with which log-probability."""

from __future__ import annotations

import math

import pytest
import torch

from pipelines.config.engine import GeneratingArgs
from pipelines.megatron.logprobs import process_logits, sample_tokens

LARGEST = 1.0 - 2.0**-53
PLAIN = GeneratingArgs()


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([[math.log(p) if p else -math.inf for p in probabilities]], dtype=torch.float64)


def draw(logits: torch.Tensor, uniform: float, args: GeneratingArgs = PLAIN) -> tuple[int, float]:
    tokens, logprobs = sample_tokens(logits, torch.tensor([uniform], dtype=torch.float64), args)
    assert logprobs.dtype is torch.float64
    return int(tokens), float(logprobs)


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 0), (0.2499, 0), (0.2501, 1), (0.7499, 1), (0.7501, 2), (LARGEST, 2)],
)
def test_the_first_token_whose_cumulative_probability_exceeds_the_number(uniform: float, token: int) -> None:
    probabilities = (0.25, 0.5, 0.25)
    drawn, logprob = draw(logits_of(*probabilities), uniform)
    assert drawn == token
    assert logprob == pytest.approx(math.log(probabilities[token]), rel=1e-6)


def test_a_boundary_belongs_to_the_next_token() -> None:
    """Two equal logits: the first token's cumulative probability is exactly 1/2."""
    assert draw(torch.zeros(1, 2), 0.5 - 2.0**-53)[0] == 0
    assert draw(torch.zeros(1, 2), 0.5)[0] == 1


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, LARGEST])
def test_excluded_tokens_are_never_drawn(uniform: float) -> None:
    """The first, the last and a middle token are cut off; rounding of the cumulative sum must not let them in."""
    logits = torch.tensor([[-math.inf, 0.1, -math.inf, 0.3, 0.2, -math.inf]])
    token, logprob = draw(logits, uniform)
    assert token in (1, 3, 4)
    assert math.isfinite(logprob)


def test_the_largest_number_draws_the_last_possible_token_even_where_the_sum_stays_below_one() -> None:
    """The cumulative sum of 1/49 forty-nine times may end below 1 - 2^-53; the number must still draw a token."""
    logits = torch.cat((torch.zeros(1, 49), torch.full((1, 3), -math.inf)), dim=1)
    assert draw(logits, LARGEST)[0] == 48


def test_temperature_divides_the_logits() -> None:
    """Odds 1 : 3 at temperature 1/2 are 1 : 9."""
    token, logprob = draw(logits_of(0.25, 0.75), 0.11, GeneratingArgs(temperature=0.5))
    assert token == 1
    assert logprob == pytest.approx(math.log(0.9), rel=1e-6)
    assert draw(logits_of(0.25, 0.75), 0.09, GeneratingArgs(temperature=0.5))[0] == 0


def test_top_k_keeps_the_most_likely_and_renormalises() -> None:
    """Of 0.1, 0.4, 0.3, 0.2 the two largest keep 4/7 and 3/7."""
    probabilities = process_logits(logits_of(0.1, 0.4, 0.3, 0.2), GeneratingArgs(top_k=2)).exp()
    assert probabilities.flatten().tolist() == pytest.approx([0.0, 4 / 7, 3 / 7, 0.0], rel=1e-14)


def test_top_k_of_zero_or_the_whole_vocabulary_keeps_all() -> None:
    for top_k in (0, 4, 9):
        probabilities = process_logits(logits_of(0.1, 0.4, 0.3, 0.2), GeneratingArgs(top_k=top_k)).exp()
        assert probabilities.flatten().tolist() == pytest.approx([0.1, 0.4, 0.3, 0.2], rel=1e-14)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """In order 0.4, 0.3, 0.2, 0.1: 0.65 needs two tokens, 0.75 three."""
    two = process_logits(logits_of(0.1, 0.4, 0.3, 0.2), GeneratingArgs(top_p=0.65)).exp()
    assert two.flatten().tolist() == pytest.approx([0.0, 4 / 7, 3 / 7, 0.0], rel=1e-14)
    three = process_logits(logits_of(0.1, 0.4, 0.3, 0.2), GeneratingArgs(top_p=0.75)).exp()
    assert three.flatten().tolist() == pytest.approx([0.0, 4 / 9, 3 / 9, 2 / 9], rel=1e-14)


def test_top_p_always_keeps_the_most_likely_token() -> None:
    probabilities = process_logits(logits_of(0.2, 0.5, 0.3), GeneratingArgs(top_p=0.01)).exp()
    assert probabilities.flatten().tolist() == [0.0, 1.0, 0.0]


def test_top_p_counts_what_top_k_left() -> None:
    """top-k 2 leaves 4/7 and 3/7; 0.5 is reached by the first alone, though it has only 0.4 of the whole."""
    probabilities = process_logits(logits_of(0.1, 0.4, 0.3, 0.2), GeneratingArgs(top_k=2, top_p=0.5)).exp()
    assert probabilities.flatten().tolist() == [0.0, 1.0, 0.0, 0.0]


def test_the_logprob_is_that_of_the_processed_distribution() -> None:
    args = GeneratingArgs(temperature=0.7, top_k=5, top_p=0.9)
    logits = torch.randn(40, 12, generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, uniforms, args)
    expected = process_logits(logits, args)[torch.arange(40), tokens]
    assert logprobs.tolist() == expected.tolist()
    assert torch.isfinite(logprobs).all()


def test_a_row_is_drawn_alike_alone_and_in_a_batch() -> None:
    logits = torch.randn(16, 9, generator=torch.Generator().manual_seed(3))
    uniforms = torch.rand(16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, uniforms, PLAIN)
    alone = [sample_tokens(logits[i : i + 1], uniforms[i : i + 1], PLAIN) for i in range(16)]
    assert [int(token) for token, _ in alone] == tokens.tolist()
    assert [float(logprob) for _, logprob in alone] == logprobs.tolist()
