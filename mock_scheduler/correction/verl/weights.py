"""Importance weights of verl from revision e7cdce1c on.

Contract: pure function. Weights are computed from the mask before any rejection. Kept: weights are multiplied by the
mask, so that NaN or inf at padding becomes NaN; a NaN mean silently turns batch normalisation off, with factor 1.
Batch normalisation is that of a single process, and ``log_ratio`` is then the whole batch.
"""

from __future__ import annotations

import torch

from mock_scheduler.correction.verl.arguments import WeightBounds, read_choice, read_weight_bounds
from mock_scheduler.correction.verl.masked import compute_ratios, masked_mean, mean_of
from mock_scheduler.correction.verl.metrics import MeasuredRatios, ratio_metrics
from mock_scheduler.correction.verl.releases import BatchNorm, Behaviour

_LEVELS = frozenset({"token", "sequence"})


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
