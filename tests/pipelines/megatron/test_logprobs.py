"""Log-probabilities and entropy of one process against torch's own log_softmax."""

from __future__ import annotations

import math

import pytest
import torch

from pipelines.megatron.logprobs import VocabShard, vocab_parallel_logprobs

WIDTH = 7


def random_logits(dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3).to(dtype)


TARGETS = torch.tensor([[0, 2, 4], [4, 1, 3]])


def reference(
    logits: torch.Tensor, allowed: torch.Tensor | None, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = logits / temperature
    if allowed is not None:
        scaled = scaled[..., allowed]
    logprobs = scaled.log_softmax(dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    columns = torch.arange(WIDTH) if allowed is None else allowed.nonzero().flatten()
    position = torch.searchsorted(columns, TARGETS)
    return logprobs.gather(-1, position.unsqueeze(-1)).squeeze(-1), entropy


@pytest.mark.parametrize(
    "allowed",
    [None, [True] * 5 + [False] * 2, [True, True, True, True, True, False, True]],
    ids=["whole", "padded", "excluded"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_values_and_gradients_are_those_of_log_softmax(
    allowed: list[bool] | None, dtype: torch.dtype, tolerance: float
) -> None:
    """Over allowed columns only; the others must get a gradient of exactly 0."""
    mask = None if allowed is None else torch.tensor(allowed)
    ours = random_logits(dtype).requires_grad_()
    theirs = random_logits(dtype).requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(
        ours, TARGETS, VocabShard(start=0, width=WIDTH, allowed=mask), temperature=0.7
    )
    expected_logprobs, expected_entropy = reference(theirs, mask, 0.7)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropy, expected_entropy, rtol=tolerance, atol=tolerance)
    weights = torch.arange(6, dtype=dtype).reshape(2, 3)
    (weights * logprobs + (weights - 3) * entropy).sum().backward()
    (weights * expected_logprobs + (weights - 3) * expected_entropy).sum().backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance * 20, atol=tolerance * 20)
    if mask is not None:
        assert ours.grad[..., ~mask].eq(0.0).all()


def test_two_tokens_by_hand() -> None:
    """Logits 0 and ln 3: probabilities 1/4 and 3/4, H = ln 4 - (3/4) ln 3."""
    logits = torch.tensor([[[0.0, math.log(3.0)]]], dtype=torch.float64, requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([[1]]), VocabShard(start=0, width=2))
    assert logprobs.item() == pytest.approx(math.log(0.75), rel=1e-15)
    assert entropy.item() == pytest.approx(math.log(4.0) - 0.75 * math.log(3.0), rel=1e-15)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx([-0.25, 0.25], rel=1e-15)


def test_gradients_pass_gradcheck_in_float64() -> None:
    shard = VocabShard(start=0, width=WIDTH, allowed=torch.tensor([True] * 5 + [False] * 2))
    logits = random_logits(torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_logprobs(x, TARGETS, shard, temperature=0.7), (logits,))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_nothing_is_narrowed_and_bfloat16_is_widened(dtype: torch.dtype, expected: torch.dtype) -> None:
    logits = random_logits(dtype)
    logprobs, entropy = vocab_parallel_logprobs(logits, TARGETS, VocabShard(start=0, width=WIDTH))
    assert (logprobs.dtype, entropy.dtype) == (expected, expected)
    widened, _ = vocab_parallel_logprobs(logits.to(expected), TARGETS, VocabShard(start=0, width=WIDTH))
    assert logprobs.tolist() == widened.tolist()


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[1e4, 0.0, -1e4]]])
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([[1]]), VocabShard(start=0, width=3))
    assert (logprobs.item(), entropy.item()) == (-1e4, 0.0)


def test_an_excluded_column_counts_for_nothing_however_large_its_logit() -> None:
    shard = VocabShard(start=0, width=3, allowed=torch.tensor([True, True, False]))
    logits = torch.tensor([[[0.0, 0.0, 1e30]]], dtype=torch.float64)
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([[0]]), shard)
    assert logprobs.item() == pytest.approx(-math.log(2.0), rel=1e-15)
    assert entropy.item() == pytest.approx(math.log(2.0), rel=1e-15)
