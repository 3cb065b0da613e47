"""Finds tokens for which rounding chose other experts.

The experts of a token are a choice by order: where two experts' logits are as near to each other as rounding moves
them, two honest runs choose differently, and everything this token computes afterwards differs at its full size. Such a
token is counted and left out of tensors stored in the order of its chosen experts.

With a the baseline: a token with another choice is a *flip by rounding* where for every expert e chosen by the baseline
only and f chosen by the candidate only, logit_a[e] - logit_a[f] is at most twice the largest |Δlogit| of the token: e
stood before f by no more than the two runs' logits moved. A decision needs a cause: of logits equal to the last bit
another choice is no rounding, whatever a bias added to them may say of their order. Needs the router's logits of both
runs.
"""

from __future__ import annotations

import torch

from mock_scheduler.comparison.pairing.pairs import TensorPair
from mock_scheduler.comparison.pairing.tokens import TokenAlignment
from mock_scheduler.comparison.residuals import OtherChoice, Residual
from mock_scheduler.comparison.tensors import ExpertFlips
from mock_scheduler.comparison.thresholds import FLIP_MOVES


def find_flips(choice: TensorPair, logits: TensorPair) -> tuple[ExpertFlips, torch.Tensor]:
    """Counts tokens with choices changed by rounding alone; and returns bool ``[T]``: which ones.

    Args:
        choice: Integers ``[T, slots]``.
        logits: Floats ``[T, experts]``.
    """
    num_tokens, num_experts = logits.baseline.shape
    mine, other = (_one_hot(side, num_experts) for side in (choice.baseline, choice.candidate))
    only_mine, only_other = mine & ~other, other & ~mine
    left, right = logits.baseline.double(), logits.candidate.double()
    moved = (left - right).abs().amax(dim=1)
    # The widest pair decides: the best expert only the baseline chose, and the worst only the candidate did.
    gap = left.masked_fill(~only_mine, -torch.inf).amax(dim=1) - left.masked_fill(~only_other, torch.inf).amin(dim=1)
    num_swapped = only_mine.sum(dim=1)
    # As many experts out as in: a token that lost an expert was dropped, which rounding does not do.
    is_flipped = (num_swapped > 0) & (num_swapped == only_other.sum(dim=1))
    # With a bias beside the logits the gap may be below 0, so that it alone would excuse a choice without a cause.
    is_flipped &= (moved > 0) & (gap <= FLIP_MOVES * moved)
    for pair in (choice, logits):
        if pair.present is not None:
            is_flipped &= pair.present.reshape(num_tokens, -1).all(dim=1)
    num_flipped = int(is_flipped.sum())
    largest_gap = max(0.0, float(gap[is_flipped].max())) if num_flipped else 0.0
    summary = ExpertFlips(key=choice.key, num_tokens=num_tokens, num_flipped=num_flipped, largest_gap=largest_gap)
    return summary, is_flipped


def explain_choice(choice: TensorPair, tokens: TokenAlignment) -> Residual | None:
    """Names the first token with other experts, those that it lost and gained, and counts such tokens.

    Args:
        choice: Integers ``[T, slots]``.
        tokens: Of the step.
    """
    if choice.baseline.dim() != 2 or not choice.baseline.numel():
        return None
    num_experts = 1 + int(max(choice.baseline.max(), choice.candidate.max()))
    mine, other = (_one_hot(side, max(num_experts, 1)) for side in (choice.baseline, choice.candidate))
    if choice.present is not None:
        is_there = choice.present.reshape(len(mine), -1).all(dim=1, keepdim=True)
        mine, other = mine & is_there, other & is_there
    differs = (mine != other).any(dim=1)
    if not bool(differs.any()):
        return None
    first = int(differs.nonzero()[0])
    # A trace without rows, as of one tensor alone, names no sample.
    sample, position = tokens.find(first) if tokens.rows.num_tokens == len(mine) else ("", first)
    detail = OtherChoice(
        num_tokens=len(mine),
        num_fewer=int((other.sum(dim=1) < mine.sum(dim=1)).sum()),
        sample=sample,
        position=position,
        lost=tuple((mine & ~other)[first].nonzero().flatten().tolist()),
        gained=tuple((other & ~mine)[first].nonzero().flatten().tolist()),
    )
    return Residual(kind="choice", value=float(differs.sum()), explained=1.0, detail=detail)


def _one_hot(chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Returns bool ``[T, experts]``; numbers of no expert, as of a dropped token, choose none."""
    is_expert = (chosen >= 0) & (chosen < num_experts)
    counts = torch.zeros(len(chosen), num_experts, dtype=torch.int64)
    counts.scatter_add_(1, chosen.long().clamp(0, num_experts - 1), is_expert.long())
    return counts > 0
