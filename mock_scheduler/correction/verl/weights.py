"""Importance weights of verl: of 0.6.0, and of all releases from revision e7cdce1c on.

Contract: pure functions. Kept: weights are multiplied by the mask, so that NaN or inf at padding becomes NaN; a NaN
mean silently turns batch normalisation off, with factor 1. Batch normalisation is that of a single process, and
``log_ratio`` is then the whole batch. Kept in 0.6.0: a veto that is on by default; quantiles, which torch refuses in
half precision and above 16 million tokens (RuntimeError); an all-zero mask that fails an assertion.
"""

from __future__ import annotations

import torch

from mock_scheduler.correction.verl.arguments import WeightBounds, read_choice, read_number, read_weight_bounds
from mock_scheduler.correction.verl.rejection import masked_fractions, veto_rows
from mock_scheduler.correction.verl.releases import BatchNorm, Behaviour
from mock_scheduler.correction.verl.statistics import (
    MeasuredRatios,
    compute_ratios,
    masked_mean,
    mean_of,
    policy_metrics,
    ratio_metrics,
)

_LEVELS = frozenset({"token", "sequence"})
_LEVELS_OF_0_6_0 = frozenset({"token", "sequence", "geometric"})
_MODES_OF_0_6_0 = frozenset({"truncate", "mask"})
_QUANTILES_OF_0_6_0 = {"p25": 0.25, "p50": 0.50, "p75": 0.75, "p95": 0.95, "p99": 0.99}


def importance_weights(
    behaviour: Behaviour, log_ratio: torch.Tensor, mask: torch.Tensor, arguments: dict[str, object]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Weights [B, T] and metrics ``rollout_is_*`` (no prefix) of log ratios [B, T].

    Raises ValueError or TypeError for a level or threshold that the release refuses, and ZeroDivisionError where every
    weight became 0.
    """
    level = read_choice("rollout_is", arguments["rollout_is"], _LEVELS)
    bounds = read_weight_bounds(arguments["rollout_is_threshold"], text_bounds=behaviour.text_bounds)
    ratios = compute_ratios(level, log_ratio, mask)
    # Times the mask, so NaN at padding stays NaN.
    raw = (ratios.per_token.clamp(max=bounds.upper) if behaviour.truncates_first else ratios.per_token) * mask
    applied = _apply_bounds(raw, bounds)
    lower = 1.0 / bounds.upper if bounds.lower is None else bounds.lower
    measured = MeasuredRatios(
        applied=applied if behaviour.measures_applied else raw,
        raw=raw,
        of_rows=ratios.of_rows,
        mask=mask,
        lower=lower,
        upper=bounds.upper,
        clamp_lower=0.0 if behaviour.measures_applied else lower,
    )
    metrics = ratio_metrics("rollout_is", measured)
    if bounds.lower is not None:
        metrics["rollout_is_oob_ratio"] = mean_of((raw < bounds.lower) | (raw > bounds.upper), mask)
    weights = applied.detach() if behaviour.detaches else applied
    if not arguments.get("rollout_is_batch_normalize", False):
        return weights, metrics
    mean = _batch_mean(behaviour.batch_norm, level, weights, mask)
    # NaN is not above it either, so it turns normalisation off.
    if not mean > 1e-8:
        return weights, metrics | {"rollout_is_batch_norm_factor": 1.0}
    return weights / mean, metrics | {"rollout_is_batch_norm_factor": mean.item()}


def _apply_bounds(raw: torch.Tensor, bounds: WeightBounds) -> torch.Tensor:
    if bounds.lower is None:
        return raw.clamp(max=bounds.upper)
    return torch.where((raw >= bounds.lower) & (raw <= bounds.upper), raw, torch.zeros_like(raw))


def _batch_mean(batch_norm: BatchNorm, level: str, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if level == "token":
        return masked_mean(weights, mask)
    rows = masked_mean(weights, mask, -1)
    if batch_norm == "all_rows":
        return rows.mean()
    counted = (mask.sum(dim=-1) > 0).to(dtype=weights.dtype)
    return (rows * counted).sum() / counted.sum().clamp_min(1e-8)


def weights_of_0_6_0(
    behaviour: Behaviour,
    *,
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    mask: torch.Tensor,
    arguments: dict[str, object],
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Weights [B, T] and metrics, those of policies with their own prefix; ``None`` and none without a threshold."""
    if arguments["rollout_is_threshold"] is None:
        return None, {}
    upper = read_number("rollout_is_threshold", arguments["rollout_is_threshold"])
    given = arguments["rollout_is_threshold_lower"]
    lower = 1.0 / upper if given is None else read_number("rollout_is_threshold_lower", given)
    log_ratio = old_log_prob - rollout_log_prob
    level = read_choice("rollout_is_level", arguments["rollout_is_level"], _LEVELS_OF_0_6_0)
    ratios = compute_ratios(level, log_ratio, mask)
    # Without a veto, weights are multiplied by ones in float32, which is what their dtype becomes.
    veto = arguments["rollout_is_veto_threshold"]
    veto = float("nan") if veto is None else read_number("rollout_is_veto_threshold", veto)
    passed, metrics = veto_rows(log_ratio, mask, veto)
    if not mask.any():
        raise AssertionError("response_mask selects no token; 0.6.0 asserts that it selects one")
    measured = MeasuredRatios.of_raw(ratios, mask, lower=lower, upper=upper)
    by_token = behaviour.geometric_fractions_by_token and level == "geometric"
    metrics |= ratio_metrics("rollout_is", measured, fractions_by_token=by_token, divides_tensors=True)
    selected = ratios.per_token[mask.bool()]
    metrics |= {f"rollout_is_{name}": torch.quantile(selected, at).item() for name, at in _QUANTILES_OF_0_6_0.items()}
    if read_choice("rollout_is_mode", arguments["rollout_is_mode"], _MODES_OF_0_6_0) == "truncate":
        weights = ratios.per_token.clamp(max=upper)
    else:
        kept = ((ratios.per_token >= lower) & (ratios.per_token <= upper)).float()
        metrics |= masked_fractions("rollout_is", level, kept, mask)
        weights = ratios.per_token * kept
    policies = policy_metrics(old_log_prob, rollout_log_prob, mask, has_chi2=behaviour.has_chi2)
    metrics |= {f"{behaviour.policy_prefix}{name}": value for name, value in policies.items()}
    return weights * passed * mask, metrics
