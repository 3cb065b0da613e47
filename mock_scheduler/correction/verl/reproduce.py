"""The one entry into verl's releases: weights, mask and metrics of a batch as one release computes them.

Contract: pure functions. Weights and masks are those of the release to the bit, metrics have its names and definitions,
and wrong arguments raise its exceptions. Nothing is repaired: log-probabilities keep their dtype, NaN at padding
reaches the weights, and bounds of k1 are inverted. For right results use the rules of ``rollout_correction`` instead.

Kept in weights: they are multiplied by the mask, so NaN or inf at padding becomes NaN; a NaN mean silently turns batch
normalisation off, with factor 1. Batch normalisation is a single process's, and ``log_ratio`` is then the whole batch.
Kept in 0.6.0: a veto that is on by default; quantiles, which torch refuses in half precision and above 16 million
tokens (RuntimeError); an all-zero mask that fails an assertion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mock_scheduler.correction.verl.arguments import WeightBounds, read_choice, read_number, read_weight_bounds
from mock_scheduler.correction.verl.rejection import (
    apply_veto,
    masked_fractions,
    reject_by_divergence,
    reject_by_ratio,
    veto_rows,
)
from mock_scheduler.correction.verl.releases import BEHAVIOURS, BatchNorm, Behaviour, VerlRelease
from mock_scheduler.correction.verl.statistics import (
    MeasuredRatios,
    compute_ratios,
    masked_mean,
    mean_of,
    policy_metrics,
    ratio_metrics,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReleaseCorrection:
    """Holds a release's results, in the layout of the inputs.

    weights: in the dtype of the release, ``None`` where it computes none. mask: the response mask without rejected
    tokens, in the dtype of the release. metrics: by the release's names, prefix included.
    """

    weights: torch.Tensor | None
    mask: torch.Tensor
    metrics: dict[str, float]


def correct(
    release: VerlRelease,
    *,
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    arguments: Mapping[str, object],
    cu_seqlens: torch.Tensor | None = None,
) -> ReleaseCorrection:
    """Computes weights, mask and metrics as one verl release does.

    The batch is whole on every rank: nothing is communicated, as in verl's driver.

    Args:
        release: The release.
        old_log_prob: The trainer's log-probabilities, floating ``[B, T]``, or ``[N]`` with ``cu_seqlens``.
        rollout_log_prob: The engine's, of the same shape.
        response_mask: Nonzero on response tokens, of the same shape.
        arguments: By the release's own parameter names; absent ones take its Python defaults.
        cu_seqlens: Integer ``[S + 1]``, the starts of packed sequences. The release still computes on the padded
            batch; packed weights are then 0 outside of the mask, since no padding is left that could be NaN.

    Raises:
        ValueError, TypeError, ZeroDivisionError: Where the release raises them.
        RuntimeError: A bound does not fit the dtype.
        AssertionError: A mask without a token, in 0.6.0.
    """
    if cu_seqlens is None:
        return _correct_padded(BEHAVIOURS[release], old_log_prob, rollout_log_prob, response_mask, arguments)
    inside = _find_inside(cu_seqlens.long().to(response_mask.device))
    old, rollout, mask = (_pad(tensor, inside) for tensor in (old_log_prob, rollout_log_prob, response_mask))
    result = _correct_padded(BEHAVIOURS[release], old, rollout, mask, arguments)
    weights = None
    if result.weights is not None:
        packed = result.weights[inside]
        weights = torch.where(response_mask != 0, packed, torch.zeros_like(packed))
    return ReleaseCorrection(weights=weights, mask=result.mask[inside], metrics=result.metrics)


def _find_inside(offsets: torch.Tensor) -> torch.Tensor:
    """bool ``[S, longest sequence]``: True at places of the padded batch that have a token of the packed one."""
    lengths = offsets.diff()
    width = int(lengths.max()) if len(lengths) else 0
    return torch.arange(width, device=offsets.device) < lengths[:, None]


def _pad(packed: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Returns the packed tensor as a padded one, one line per sequence."""
    lines = packed.new_zeros(inside.shape)
    lines[inside] = packed
    return lines


def _correct_padded(
    behaviour: Behaviour,
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    mask: torch.Tensor,
    arguments: Mapping[str, object],
) -> ReleaseCorrection:
    complete = behaviour.complete(arguments)
    if behaviour.rejects_by == "weight":
        weights, metrics = weights_of_0_6_0(
            behaviour, old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, mask=mask, arguments=complete
        )
        # Rejection by weights of 0 leaves the mask, so that the loss still counts these tokens.
        return ReleaseCorrection(weights=weights, mask=mask, metrics=_prefixed(behaviour.prefix, metrics))
    _check_inputs(old_log_prob, rollout_log_prob, mask)
    log_ratio = old_log_prob - rollout_log_prob
    weights, metrics = None, {}
    if complete["rollout_is"] is not None and complete["rollout_is_threshold"] is not None:
        # Weights are computed from the mask before any rejection.
        weights, metrics = importance_weights(behaviour, log_ratio, mask, complete)
    kept_mask, rejection = _reject(behaviour, log_ratio, mask, complete)
    policies = policy_metrics(old_log_prob, rollout_log_prob, mask, has_chi2=behaviour.has_chi2)
    metrics = metrics | rejection | _prefixed(behaviour.policy_prefix, policies)
    return ReleaseCorrection(weights=weights, mask=kept_mask, metrics=_prefixed(behaviour.prefix, metrics))


def _check_inputs(old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor) -> None:
    if not mask.any():
        raise ValueError("response_mask selects no token; this release refuses such a batch")
    shapes = {
        "old_log_prob": old_log_prob.shape,
        "rollout_log_prob": rollout_log_prob.shape,
        "response_mask": mask.shape,
    }
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"shapes differ: {found}; expected one shape [B, T]")


def _reject(
    behaviour: Behaviour, log_ratio: torch.Tensor, mask: torch.Tensor, arguments: dict[str, object]
) -> tuple[torch.Tensor, dict[str, float]]:
    kept_mask = mask.clone()
    metrics: dict[str, float] = {}
    missing = arguments["rollout_rs_threshold"] is None
    if arguments["rollout_rs"] is not None and missing and not behaviour.skips_rejection_without_threshold:
        raise ValueError("rollout_rs_threshold is None; rollout_rs needs one")
    if arguments["rollout_rs"] is not None and not missing:
        reject = reject_by_divergence if behaviour.rejects_by == "divergence" else reject_by_ratio
        kept_mask, metrics = reject(behaviour, log_ratio, mask, arguments)
    if behaviour.rejects_by == "divergence":
        return kept_mask, metrics
    kept_mask, veto = apply_veto(log_ratio, mask, kept_mask, arguments["rollout_token_veto_threshold"])
    return kept_mask, metrics | veto


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in metrics.items()}


_LEVELS = frozenset({"token", "sequence"})
_LEVELS_OF_0_6_0 = frozenset({"token", "sequence", "geometric"})
_MODES_OF_0_6_0 = frozenset({"truncate", "mask"})
_QUANTILES_OF_0_6_0 = {"p25": 0.25, "p50": 0.50, "p75": 0.75, "p95": 0.95, "p99": 0.99}


def importance_weights(
    behaviour: Behaviour, log_ratio: torch.Tensor, mask: torch.Tensor, arguments: dict[str, object]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Returns weights [B, T] and metrics ``rollout_is_*`` (no prefix) of log ratios [B, T].

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
