"""Computes the policy loss of one micro-batch: one dataclass in, one out; no communication, no configuration lookups.

Every term is a *sum* over response tokens. The caller divides by N, the number of response tokens of the whole update,
or of the kept ones (``rs_denominator``), so neither micro-batches nor the layout enter the denominator.
``loss_weights`` make other means of the same sum (``pipelines.batching.values``).

Contract: masked tokens enter no value and no gradient, NaN and infinities included; without counted tokens the loss is
0 with a graph. Importance weights never have a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from mock_scheduler.correction.config.rules import LOG_RATIO_BOUND, Denominator, LossType
from pipelines.algorithm.arrays import check_equal_shapes, raise_value_error
from pipelines.algorithm.kl import estimate_kl
from pipelines.config.algorithm import KlEstimator


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossConfig:
    """Coefficients of the loss; 0 switches a term off, and the defaults correct nothing.

    - pg_clip: how far the ratio counts below 1, and above it too where ``pg_clip_high`` is ``None``.
    - dual_clip: c > 1, the largest ratio that counts for a negative advantage; ``None`` does not limit it. Clips are of
      ``ppo_clip`` alone.
    - rs_denominator: whether ``num_tokens`` counts all response tokens, or the kept ones.
    - term_mask: the tokens of the entropy and KL terms: the kept ones, as with three policies, or all response tokens,
      as with two (bypass).
    - term_scale: a factor of all terms but pg. With ``rs_denominator: kept`` and ``term_mask: response``, the update's
      kept / response tokens makes them means over all response tokens again.
    - rollout_kl_coef: τ of τ·(new - rollout)² per response token, whatever ``term_mask`` says.
    """

    pg_clip: float
    pg_clip_high: float | None = None
    dual_clip: float | None = None
    entropy_loss_coef: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_estimator: KlEstimator = "k3"
    loss_type: LossType = "ppo_clip"
    rs_denominator: Denominator = "original"
    term_mask: Literal["kept", "response"] = "kept"
    term_scale: float = 1.0
    rollout_kl_coef: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossInputs:
    """``[b, T]`` tensors of one micro-batch; values where ``response_mask`` is False are never used.

    new_logprobs, entropy: with graph, from the policy under training. old_logprobs: the trainer's own, before this
    step's first update, or the rollout policy's (bypass). ref_logprobs: the reference policy's, ``None`` without a KL
    term. advantages: per token. weights: floating, the importance weights; ``None`` are 1. kept_mask: bool, False where
    a token is rejected, whose old_logprobs, advantages and weights are not used; ``None`` keeps all. loss_weights:
    floating, each token's factor in the sum; ``None`` are 1. rollout_logprobs: as sampled, for ``rollout_kl_coef``;
    where one is not finite it is not known, and adds nothing.
    """

    new_logprobs: torch.Tensor
    entropy: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    response_mask: torch.Tensor
    weights: torch.Tensor | None = None
    kept_mask: torch.Tensor | None = None
    loss_weights: torch.Tensor | None = None
    rollout_logprobs: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossOutput:
    """Sums over response tokens; ``total`` has a graph, ``metrics`` has none.

    num_tokens: int64 ``[]``, this micro-batch's share of the denominator. metrics: float64 ``[len(METRIC_SUMS)]``, in
    its order. terms: the summands, ``[b, T]`` by name, without graph: ``total_loss``, ``pg_loss``, where there is a
    reference ``kl_loss``, and with τ ``rollout_kl_loss``; besides the ``ratio``, 1 on uncounted tokens.
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
    "rollout_kl_loss",
    "approx_kl",
    "clip_frac",
    "dual_clip_frac",
    "policy_entropy",
    "response_tokens",
    "kept_tokens",
    "num_tokens",
)
"""The loss and its terms are summed as the loss is, without their coefficients: divided by ``num_tokens`` they are
what is minimised, total = pg - c_ent·entropy + c_kl·kl + τ·rollout_kl. ``policy_entropy`` is the plain sum over all
response tokens, whatever is rejected. See also ``KEPT_TOKEN_SUMS``."""

KEPT_TOKEN_SUMS = ("approx_kl", "clip_frac", "dual_clip_frac")
"""Plain sums over the tokens that are kept; divided by ``kept_tokens`` they are means."""

_COUNTS = ("response_tokens", "kept_tokens", "num_tokens")


def compute_metric_means(sums: Mapping[str, float]) -> dict[str, float]:
    """The means of an update's ``METRIC_SUMS``, each over the tokens it was summed over; 0 where there are none."""
    counts = {name: max(sums[name], 1.0) for name in _COUNTS}
    counted = {**dict.fromkeys(KEPT_TOKEN_SUMS, "kept_tokens"), "policy_entropy": "response_tokens"}
    return {name: total / counts[counted.get(name, "num_tokens")] for name, total in sums.items() if name not in counts}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTokens:
    """The policy gradient's inputs, ``[b, T]``; all is 0 where ``kept`` is False.

    log_ratio: new - old, within ± ``LOG_RATIO_BOUND``, with graph. weights: without graph, ``None`` are 1.
    """

    kept: torch.Tensor
    new_logprobs: torch.Tensor
    log_ratio: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """``[b, T]``: each token's loss, weighted; its ratio; and where it has no gradient because of a clip."""

    loss: torch.Tensor
    ratio: torch.Tensor
    is_clipped: torch.Tensor
    is_dual_clipped: torch.Tensor


def compute_policy_loss(inputs: PolicyLossInputs, config: PolicyLossConfig) -> PolicyLossOutput:
    """Computes a policy gradient with optional entropy bonus and KL to the reference, summed over response tokens.

    With r = exp(new - old), whose exponent is cut to ± 20, A the advantage and w the weight, ``loss_type`` is

    - ``ppo_clip``: pg = w·max(-r·A, -clip(r, 1 - ε, 1 + ε)·A) (PPO, arXiv 1707.06347, eq. 7), where A < 0 and c is
      ``dual_clip`` w·min(pg, c·|A|) (dual-clip PPO, arXiv 1912.09729);
    - ``reinforce``: pg = -w·A·new, the gradient of the policy weighted by how it differs from the rollout policy;
    - ``ratio``: pg = -w·A·r.

    kl is the estimate of KL(new‖ref) by ``kl_loss_estimator``, with its gradient as ``kl`` says (k3: DeepSeekMath,
    arXiv 2402.03300, eq. 4; k1 pulls nowhere on average). total = pg - c_ent·H + c_kl·kl + τ·(new - rollout)², each
    times ``loss_weights``. Three metrics have no gradient: ``approx_kl`` is k3(new - old), an estimate of KL(old‖new);
    ``clip_frac`` counts tokens whose clipped branch is strictly larger, and ``dual_clip_frac`` tokens where c·|A| is
    strictly smaller. Raises ``ValueError`` naming every tensor of another shape, or where τ is set and
    ``rollout_logprobs`` are missing.
    """
    check_inputs(inputs, config)
    tokens = keep_tokens(inputs)
    if config.loss_type == "ppo_clip":
        surrogate = _clipped_surrogate(tokens, config)
    else:
        surrogate = _plain_surrogate(tokens, is_reinforce=config.loss_type == "reinforce")
    if tokens.weights is not None:
        surrogate = replace(surrogate, loss=tokens.weights * surrogate.loss)
    return sum_terms(inputs, tokens, surrogate, config)


def check_inputs(inputs: PolicyLossInputs, config: PolicyLossConfig) -> None:
    """Raises ``ValueError`` naming every missing tensor, and every one of another shape than the mask."""
    tensors = {
        "response_mask": inputs.response_mask,
        "new_logprobs": inputs.new_logprobs,
        "entropy": inputs.entropy,
        "old_logprobs": inputs.old_logprobs,
        "advantages": inputs.advantages,
    }
    optional = {
        "ref_logprobs": inputs.ref_logprobs,
        "weights": inputs.weights,
        "kept_mask": inputs.kept_mask,
        "loss_weights": inputs.loss_weights,
        "rollout_logprobs": inputs.rollout_logprobs,
    }
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    check_equal_shapes("policy loss", tensors | given)
    if config.rollout_kl_coef and inputs.rollout_logprobs is None:
        problem = f"rollout_kl_coef is {config.rollout_kl_coef}, and rollout_logprobs are missing"
        raise_value_error("policy loss", [problem])


def keep_tokens(inputs: PolicyLossInputs) -> KeptTokens:
    """Prepares the policy gradient's inputs, with 0 in the place of everything uncounted."""
    kept = inputs.response_mask if inputs.kept_mask is None else inputs.response_mask & inputs.kept_mask
    new_logprobs = torch.where(kept, inputs.new_logprobs, 0.0)
    log_ratio = new_logprobs - torch.where(kept, inputs.old_logprobs, 0.0)
    weights = None
    if inputs.weights is not None:
        weights = torch.where(kept, inputs.weights.detach(), 0.0).to(new_logprobs.dtype)
    return KeptTokens(
        kept=kept,
        new_logprobs=new_logprobs,
        # Within the range of exp in every dtype, as verl 0.9.1 bounds it: r = inf would make NaN of an advantage of 0.
        log_ratio=log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND),
        advantages=torch.where(kept, inputs.advantages, 0.0),
        weights=weights,
    )


def sum_terms(
    inputs: PolicyLossInputs, tokens: KeptTokens, surrogate: Surrogate, config: PolicyLossConfig
) -> PolicyLossOutput:
    """Sums the policy gradient and the other terms of the loss, each under its own mask."""
    mask, kept = inputs.response_mask, tokens.kept
    # One factor per token and no mean: the caller divides once, by the tokens of the whole update.
    factor = mask.to(tokens.log_ratio.dtype)
    if inputs.loss_weights is not None:
        factor = torch.where(mask, inputs.loss_weights, 0.0).to(tokens.log_ratio.dtype)
    of_terms = mask if config.term_mask == "response" else kept
    term_factor = factor * of_terms * config.term_scale

    policy_gradient = surrogate.loss * (factor * kept)
    entropy = torch.where(of_terms, inputs.entropy, 0.0) * term_factor
    total = policy_gradient - config.entropy_loss_coef * entropy
    by_token = {"ratio": surrogate.ratio, "pg_loss": policy_gradient}
    kl = rollout_kl = torch.zeros_like(policy_gradient)
    if inputs.ref_logprobs is not None:
        log_ratio = torch.where(of_terms, inputs.ref_logprobs, 0.0) - torch.where(of_terms, inputs.new_logprobs, 0.0)
        kl = by_token["kl_loss"] = estimate_kl(log_ratio, config.kl_loss_estimator) * term_factor
        total = total + config.kl_loss_coef * kl
    if config.rollout_kl_coef and inputs.rollout_logprobs is not None:
        is_known = mask & inputs.rollout_logprobs.isfinite()
        new_logprobs = torch.where(is_known, inputs.new_logprobs, 0.0)
        difference = new_logprobs - torch.where(is_known, inputs.rollout_logprobs, 0.0)
        rollout_kl = by_token["rollout_kl_loss"] = difference.square() * (factor * config.term_scale)
        total = total + config.rollout_kl_coef * rollout_kl
    by_token["total_loss"] = total

    num_kept, num_response = kept.sum(), mask.sum()
    num_tokens = num_kept if config.rs_denominator == "kept" else num_response
    terms = (total, policy_gradient, entropy, kl, rollout_kl)
    of_kept = (estimate_kl(tokens.log_ratio, "k3"), surrogate.is_clipped, surrogate.is_dual_clipped)
    # In float64, since the sums of all micro-batches are added once more.
    with torch.no_grad():
        sums = [term.double().sum() for term in terms] + [(term.double() * kept).sum() for term in of_kept]
        sums.append(torch.where(mask, inputs.entropy, 0.0).double().sum())
    return PolicyLossOutput(
        total=total.sum(),
        num_tokens=num_tokens,
        metrics=torch.stack([*sums, *(count.double() for count in (num_response, num_kept, num_tokens))]).detach(),
        terms={name: term.detach() for name, term in by_token.items()},
    )


def _clipped_surrogate(tokens: KeptTokens, config: PolicyLossConfig) -> Surrogate:
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    clip_high = config.pg_clip if config.pg_clip_high is None else config.pg_clip_high
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - config.pg_clip, 1.0 + clip_high) * advantages
    loss, is_dual_clipped = _limit_loss(torch.maximum(unclipped, clipped), advantages, config.dual_clip)
    return Surrogate(loss=loss, ratio=ratio, is_clipped=clipped > unclipped, is_dual_clipped=is_dual_clipped)


def _plain_surrogate(tokens: KeptTokens, *, is_reinforce: bool) -> Surrogate:
    ratio = tokens.log_ratio.exp()
    nowhere = torch.zeros_like(tokens.kept)
    loss = -tokens.advantages * (tokens.new_logprobs if is_reinforce else ratio)
    return Surrogate(loss=loss, ratio=ratio, is_clipped=nowhere, is_dual_clipped=nowhere)


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
