"""The policy loss of one micro-batch: one dataclass in, one out; no communication, no configuration lookups.

Every term is a *sum* over response tokens. The caller divides by the number of response tokens of the whole update
(``loss_agg_mode: token-mean``), so that neither micro-batches nor the layout enter the denominator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mock_scheduler.config.algorithm import KlEstimator
from pipelines.algorithm.checks import check_equal_shapes
from pipelines.algorithm.kl import estimate_kl


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossConfig:
    """Coefficients of the loss; 0 switches a term off.

    ``dual_clip``: c > 1, the largest ratio that counts for a negative advantage; ``None`` does not limit it.
    """

    pg_clip: float
    dual_clip: float | None = None
    entropy_loss_coef: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_estimator: KlEstimator = "k3"


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

    metrics: float64 ``[len(METRIC_SUMS)]``, in that order. terms: what was summed, ``[b, T]`` by name, without graph:
    ``ratio``, ``total_loss``, ``pg_loss`` and, where there is a reference, ``kl_loss``.
    """

    total: torch.Tensor
    num_tokens: torch.Tensor
    metrics: torch.Tensor
    terms: Mapping[str, torch.Tensor]


METRIC_SUMS = (
    "total_loss",
    "pg_loss",
    "entropy",
    "kl_loss",
    "approx_kl",
    "clip_frac",
    "dual_clip_frac",
    "num_tokens",
)


def compute_policy_loss(inputs: PolicyLossInputs, config: PolicyLossConfig) -> PolicyLossOutput:
    """PPO's clipped surrogate with optional entropy bonus and KL to the reference, summed over response tokens.

    With r = exp(new - old) and A the advantage: pg = max(-r·A, -clip(r, 1 - ε, 1 + ε)·A) (PPO, arXiv 1707.06347,
    eq. 7), and min(pg, c·|A|) where A < 0 and c is ``dual_clip`` (dual-clip PPO, arXiv 1912.09729). kl is the estimate
    of KL(new‖ref) by ``kl_loss_estimator``, with its gradient as ``kl`` says (k3: DeepSeekMath, arXiv 2402.03300,
    eq. 4; k1 pulls nowhere on average). total = pg - c_ent·H + c_kl·kl.
    ``approx_kl`` is k3(new - old), an estimate of KL(old‖new); ``clip_frac`` counts tokens where the clipped branch
    is strictly larger, and ``dual_clip_frac`` those where c·|A| is strictly smaller: none of these has a gradient.
    Raises ``ValueError`` naming every tensor of another shape.
    """
    mask = inputs.response_mask
    _check_shapes(inputs)
    new_logprobs = torch.where(mask, inputs.new_logprobs, 0.0)
    entropy = torch.where(mask, inputs.entropy, 0.0)
    old_logprobs = torch.where(mask, inputs.old_logprobs, 0.0)
    advantages = torch.where(mask, inputs.advantages, 0.0)

    log_ratio = new_logprobs - old_logprobs
    ratio = log_ratio.exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - config.pg_clip, 1.0 + config.pg_clip) * advantages
    policy_gradient, is_dual_clipped = _limit_loss(torch.maximum(unclipped, clipped), advantages, config.dual_clip)
    total = policy_gradient - config.entropy_loss_coef * entropy
    kl = torch.zeros_like(new_logprobs)
    if inputs.ref_logprobs is not None:
        kl = estimate_kl(torch.where(mask, inputs.ref_logprobs, 0.0) - new_logprobs, config.kl_loss_estimator)
        total = total + config.kl_loss_coef * kl

    num_tokens = mask.sum()
    terms = (
        total,
        policy_gradient,
        entropy,
        kl,
        estimate_kl(log_ratio, "k3"),
        clipped > unclipped,
        is_dual_clipped,
    )
    with torch.no_grad():
        sums = [(term.double() * mask).sum() for term in terms] + [num_tokens.double()]
    by_token = {"ratio": ratio, "total_loss": total, "pg_loss": policy_gradient}
    if inputs.ref_logprobs is not None:
        by_token["kl_loss"] = kl
    return PolicyLossOutput(
        total=(total * mask).sum(),
        num_tokens=num_tokens,
        metrics=torch.stack(sums).detach(),
        terms={name: term.detach() for name, term in by_token.items()},
    )


def _limit_loss(
    policy_gradient: torch.Tensor, advantages: torch.Tensor, dual_clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of dual-clip PPO, and where its limit is the smaller one.

    For A < 0 the surrogate to be maximised is max(min(r·A, clip(r)·A), c·A); negated, min(pg, -c·A) with -c·A = c·|A|.
    Without it, a token that has become much more probable, r ≫ 1, has a loss without bound.
    """
    if dual_clip is None:
        return policy_gradient, torch.zeros_like(advantages, dtype=torch.bool)
    limit = -dual_clip * advantages
    is_limited = (advantages < 0) & (policy_gradient > limit)
    return torch.where(is_limited, limit, policy_gradient), is_limited


def _check_shapes(inputs: PolicyLossInputs) -> None:
    tensors = {
        "response_mask": inputs.response_mask,
        "new_logprobs": inputs.new_logprobs,
        "entropy": inputs.entropy,
        "old_logprobs": inputs.old_logprobs,
        "advantages": inputs.advantages,
    }
    reference = {} if inputs.ref_logprobs is None else {"ref_logprobs": inputs.ref_logprobs}
    check_equal_shapes("policy loss", tensors | reference)
