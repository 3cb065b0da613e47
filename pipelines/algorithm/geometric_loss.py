"""Computes geometric-mean policy optimisation (GMPO, arXiv 2507.20673): one ratio per sequence, its tokens' log mean.

Contract: as ``losses``, with its dataclasses, except that a line of ``[b, T]`` must be one whole sequence: neither
packed nor shared among context-parallel ranks.
"""

from __future__ import annotations

import torch

from pipelines.algorithm.losses import (
    KeptTokens,
    PolicyLossConfig,
    PolicyLossInputs,
    PolicyLossOutput,
    Surrogate,
    check_inputs,
    keep_tokens,
    sum_terms,
)

#: What verl 0.9.1 adds to every weight before it takes logarithms.
VERL_ZERO_WEIGHT_FLOOR = 1e-10


def compute_geometric_loss(
    inputs: PolicyLossInputs, config: PolicyLossConfig, *, zero_weight_floor: float | None = None
) -> PolicyLossOutput:
    """Computes the policy gradient -A·w·exp(mean clipped log ratio) of every line, and the other terms of ``losses``.

    With ℓ = new - old of a kept token, ε ``pg_clip`` below and ``pg_clip_high`` above, and s = sgn(A), its log ratio
    counts as s·min(s·ℓ, s·clip(ℓ, -ε, ε)): clipped in the direction of gain. A is the mean of the line's advantages,
    and w the geometric mean of its weights, all over kept tokens.

    A weight of 0 takes its token out of the mean of the weights, and w is 0 where all are. ``zero_weight_floor``
    instead adds this number to every weight. verl 0.9.1 adds 1e-10: one zero among T tokens then makes w about
    1e-10^(1/T) times as large.

    A line's loss is spread evenly over its kept tokens. With ``loss_weights`` of ``seq-mean-token-sum``, N/B on each
    token, the sum divided by N is the mean over the B sequences. ``clip_frac`` counts clipped tokens; ``dual_clip`` and
    ``loss_type`` have no part in it. Raises as ``compute_policy_loss``.
    """
    check_inputs(inputs, config)
    tokens = keep_tokens(inputs)
    log_ratio, sign = tokens.log_ratio, tokens.advantages.sign()
    clip_high = config.pg_clip if config.pg_clip_high is None else config.pg_clip_high
    within = log_ratio.clamp(-config.pg_clip, clip_high)
    ratio = _mean(sign * torch.minimum(sign * log_ratio, sign * within), tokens.kept).exp()
    loss = -_mean(tokens.advantages, tokens.kept) * ratio
    if tokens.weights is not None:
        loss = loss * _sequence_weights(tokens.weights, tokens, zero_weight_floor)
    # Spread over the line's tokens, so that a sum over tokens has each sequence once.
    num_kept = tokens.kept.sum(dim=-1, keepdim=True)
    surrogate = Surrogate(
        loss=(loss / num_kept.clamp(min=1)).expand_as(log_ratio),
        ratio=ratio.expand_as(log_ratio),
        is_clipped=sign * within < sign * log_ratio,
        is_dual_clipped=torch.zeros_like(tokens.kept),
    )
    return sum_terms(inputs, tokens, surrogate, config)


def _mean(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The mean of each line where ``counts`` is True, ``[b, 1]``; values are 0 elsewhere; 0 where it never is."""
    return values.sum(dim=-1, keepdim=True) / counts.sum(dim=-1, keepdim=True).clamp(min=1)


def _sequence_weights(weights: torch.Tensor, tokens: KeptTokens, zero_weight_floor: float | None) -> torch.Tensor:
    """Returns the geometric mean of each line's weights, ``[b, 1]``."""
    counts = tokens.kept if zero_weight_floor is not None else tokens.kept & (weights > 0)
    floored = weights + (zero_weight_floor or 0.0)
    mean = _mean(torch.where(counts, floored, 1.0).log(), counts).exp()
    return torch.where(counts.any(dim=-1, keepdim=True), mean, 0.0)
