"""The policy loss of one micro-batch: one dataclass in, one out; no communication, no configuration lookups.

Every term is a *sum* over response tokens. The caller divides by the number of response tokens of the whole update
(``loss_agg_mode: token-mean``), so that neither micro-batches nor the layout enter the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossConfig:
    """Coefficients of the loss; 0 switches a term off."""

    pg_clip: float
    entropy_loss_coef: float = 0.0
    kl_loss_coef: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossInputs:
    """``[b, T]`` tensors of one micro-batch; values where ``response_mask`` is False are never used.

    new_logprobs, entropy: with graph, from the policy under training. old_logprobs: the trainer's own, before this
    step's first update. ref_logprobs: the reference policy's, ``None`` without a KL term. advantages: per token.
    """

    new_logprobs: torch.Tensor
    entropy: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    response_mask: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossOutput:
    """Sums over response tokens; ``total`` has a graph, ``metrics`` has none.

    metrics: float64 ``[len(METRIC_SUMS)]``, in that order.
    """

    total: torch.Tensor
    num_tokens: torch.Tensor
    metrics: torch.Tensor


METRIC_SUMS = ("total_loss", "pg_loss", "entropy", "kl_loss", "approx_kl", "clip_frac", "num_tokens")


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(x) - 1 - x ≥ 0: unbiased for KL(q‖p) with x = log p - log q, samples from q (joschu.net/blog/kl-approx)."""
    return torch.expm1(log_ratio) - log_ratio


def compute_policy_loss(inputs: PolicyLossInputs, config: PolicyLossConfig) -> PolicyLossOutput:
    """PPO's clipped surrogate with optional entropy bonus and KL to the reference, summed over response tokens.

    With r = exp(new - old) and A the advantage: pg = max(-r·A, -clip(r, 1 - ε, 1 + ε)·A) (PPO, arXiv 1707.06347,
    eq. 7); kl = k3(ref - new) (DeepSeekMath, arXiv 2402.03300, eq. 4); total = pg - c_ent·H + c_kl·kl.
    ``approx_kl`` is k3(new - old), an estimate of KL(old‖new); ``clip_frac`` counts tokens where the clipped branch
    is strictly larger, which are those without gradient.
    """
    mask = inputs.response_mask
    new_logprobs = torch.where(mask, inputs.new_logprobs, 0.0)
    entropy = torch.where(mask, inputs.entropy, 0.0)
    old_logprobs = torch.where(mask, inputs.old_logprobs, 0.0)
    advantages = torch.where(mask, inputs.advantages, 0.0)

    log_ratio = new_logprobs - old_logprobs
    ratio = log_ratio.exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - config.pg_clip, 1.0 + config.pg_clip) * advantages
    policy_gradient = torch.maximum(unclipped, clipped)
    total = policy_gradient - config.entropy_loss_coef * entropy
    kl = torch.zeros_like(new_logprobs)
    if inputs.ref_logprobs is not None:
        kl = _k3(torch.where(mask, inputs.ref_logprobs, 0.0) - new_logprobs)
        total = total + config.kl_loss_coef * kl

    num_tokens = mask.sum()
    terms = (total, policy_gradient, entropy, kl, _k3(log_ratio), clipped > unclipped)
    with torch.no_grad():
        sums = [(term.double() * mask).sum() for term in terms] + [num_tokens.double()]
    return PolicyLossOutput(total=(total * mask).sum(), num_tokens=num_tokens, metrics=torch.stack(sums).detach())
