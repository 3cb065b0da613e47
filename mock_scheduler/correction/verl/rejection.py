"""Rejects as verl does: by a ratio with a veto (e7cdce1c and 0.6.1), and by k1, k2 and k3 (from 0.7.1 on).

Contract: pure functions. Kept of the former: a bool or integer mask becomes float32 where something is rejected
or vetoed. Kept of the latter: k1 = −ℓ is compared with the logarithms of bounds of the ratio itself, so that ratios in
[1/upper, 1/lower] pass (verl issue 6377); each ℓ is clamped before rows are added; and NaN is rejected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mock_scheduler.correction.verl.arguments import Option, read_choice, read_number, read_options, read_positive
from mock_scheduler.correction.verl.releases import Behaviour
from mock_scheduler.correction.verl.statistics import (
    MeasuredRatios,
    clamp_log,
    clamped_std,
    compute_ratios,
    masked_mean,
    masked_range,
    masked_sum,
    mean_of,
    ratio_metrics,
    spread_metrics,
)

_LEVELS = frozenset({"token", "sequence", "geometric"})


def reject_by_ratio(
    behaviour: Behaviour, log_ratio: torch.Tensor, mask: torch.Tensor, arguments: dict[str, object]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Keeps ratios within [lower, upper], both inclusive: the mask [B, T], and metrics ``rollout_rs_*``.

    lower: 1/upper where none is given. Raises ValueError for a level, TypeError or ZeroDivisionError for a bound.
    """
    level = read_choice("rollout_rs", arguments["rollout_rs"], _LEVELS)
    upper = read_number("rollout_rs_threshold", arguments["rollout_rs_threshold"])
    given = arguments["rollout_rs_threshold_lower"]
    lower = 1.0 / upper if given is None else read_number("rollout_rs_threshold_lower", given)
    ratios = compute_ratios(level, log_ratio, mask)
    kept = ((ratios.per_token >= lower) & (ratios.per_token <= upper)).float()
    measured = MeasuredRatios.of_raw(ratios, mask, lower=lower, upper=upper)
    by_token = behaviour.geometric_fractions_by_token and level == "geometric"
    metrics = ratio_metrics("rollout_rs", measured, fractions_by_token=by_token)
    return mask * kept, metrics | masked_fractions("rollout_rs", level, kept, mask)


def masked_fractions(name: str, level: str, kept: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Returns fractions of tokens, and of all rows, without ``kept`` (float [B, T], 0 or 1)."""
    rows = masked_sum(1 - kept, mask, -1) > 0 if level == "token" else 1 - kept[:, 0]
    return {
        f"{name}_masked_fraction": masked_mean(1 - kept, mask).item(),
        f"{name}_seq_masked_fraction": rows.float().mean().item(),
    }


def veto_rows(log_ratio: torch.Tensor, mask: torch.Tensor, threshold: float) -> tuple[torch.Tensor, dict[str, float]]:
    """Returns float32 [B, 1], 0 for rows with a response token of ratio strictly below ``threshold``; and metrics.

    Log ratios are not clamped.
    """
    log_threshold = torch.log(torch.tensor(threshold, device=log_ratio.device))
    catastrophic = (log_ratio < log_threshold) & mask.bool()
    vetoed = catastrophic.any(dim=-1, keepdim=True)
    metrics = {
        "rollout_is_veto_fraction": vetoed.float().mean().item(),
        "rollout_is_catastrophic_token_fraction": mean_of(catastrophic, mask),
    }
    return (~vetoed).float(), metrics


def apply_veto(
    log_ratio: torch.Tensor, mask: torch.Tensor, kept_mask: torch.Tensor, threshold: object
) -> tuple[torch.Tensor, dict[str, float]]:
    """``kept_mask`` without vetoed rows; unchanged, with metrics of 0, where ``threshold`` is ``None``."""
    if threshold is None:
        return kept_mask, {"rollout_is_veto_fraction": 0.0, "rollout_is_catastrophic_token_fraction": 0.0}
    passed, metrics = veto_rows(log_ratio, mask, read_positive("rollout_token_veto_threshold", threshold))
    return kept_mask * passed, metrics


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Statistic:
    """A statistic and its bounds. per_token [B, T]; of_rows [B], ``None`` for options of tokens; lower: k1 only."""

    per_token: torch.Tensor
    of_rows: torch.Tensor | None
    lower: float | None
    upper: float

    def is_within(self) -> torch.Tensor:
        """Returns bool [B, T], both bounds inclusive, compared in the statistic's dtype."""
        within = self.per_token <= self.upper
        return within if self.lower is None else within & (self.per_token >= self.lower)


def reject_by_divergence(
    behaviour: Behaviour, log_ratio: torch.Tensor, mask: torch.Tensor, arguments: dict[str, object]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Keeps tokens within the bounds of every option: the mask [B, T], in its dtype, and metrics ``rollout_rs_*``.

    Raises as ``read_options`` does.
    """
    options = read_options(
        arguments["rollout_rs"],
        arguments["rollout_rs_threshold"],
        refuses_crossed_bounds=behaviour.refuses_crossed_bounds,
    )
    kept = torch.ones_like(mask, dtype=torch.bool)
    metrics: dict[str, float] = {}
    for option in options:
        statistic = _compute_statistic(option, clamp_log(log_ratio), mask)
        passes = statistic.is_within()
        kept = kept & passes
        for key, value in (_option_metrics(statistic, mask) | _rejected_fractions(passes, log_ratio, mask)).items():
            metrics[f"rollout_rs_{option.name}_{key}"] = value
    kept_float = kept.to(log_ratio.dtype)
    metrics["rollout_rs_masked_fraction"] = masked_mean(1 - kept_float, mask).item()
    metrics["rollout_rs_seq_masked_fraction"] = (~kept & mask.bool()).any(dim=-1).float().mean().item()
    return (mask * kept_float).to(mask.dtype), metrics


def _compute_statistic(option: Option, log_ratio: torch.Tensor, mask: torch.Tensor) -> _Statistic:
    # k1 = −ℓ is compared with log(lower) and log(upper), so ratios in [1/upper, 1/lower] pass (verl#6377).
    if option.estimator == "k1":
        values = -log_ratio
    elif option.estimator == "k2":
        values = 0.5 * log_ratio**2
    else:
        values = torch.exp(log_ratio) - 1.0 - log_ratio
    lower = None if option.lower is None else math.log(option.lower)
    upper = option.upper if option.lower is None else math.log(option.upper)
    if option.unit == "token":
        return _Statistic(per_token=values, of_rows=None, lower=lower, upper=upper)
    rows = _aggregate(option.unit, values, mask)
    return _Statistic(per_token=rows.unsqueeze(-1).expand_as(mask), of_rows=rows, lower=lower, upper=upper)


def _aggregate(unit: str, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if unit == "seq_sum":
        return masked_sum(values, mask, -1)
    if unit == "seq_mean":
        return masked_mean(values, mask, -1)
    largest = values.masked_fill(~mask.bool(), float("-inf")).max(dim=-1).values
    return torch.where(largest == float("-inf"), torch.zeros_like(largest), largest)


def _option_metrics(statistic: _Statistic, mask: torch.Tensor) -> dict[str, float]:
    values, lower, upper = statistic.per_token, statistic.lower, statistic.upper
    rows = masked_mean(values, mask, -1) if statistic.of_rows is None else statistic.of_rows
    rows = rows[mask.sum(dim=-1) > 0]
    of_rows = {
        **spread_metrics(rows),
        "max_deviation": rows.abs().max().item(),
        "fraction_high": (rows > upper).float().mean().item(),
    }
    if lower is not None:
        of_rows["fraction_low"] = (rows < lower).float().mean().item()
    metrics = {f"seq_{key}": value for key, value in of_rows.items()}
    metrics["mean"] = masked_mean(values, mask).item()
    metrics["std"] = clamped_std(values, mask, lower=0.0 if lower is None else lower, upper=upper)
    if statistic.of_rows is not None:
        names = ("max", "min", "fraction_high", "fraction_low")
        return metrics | {name: of_rows.get(name, 0.0) for name in names}
    metrics["max"], metrics["min"] = masked_range(values, mask)
    metrics["fraction_high"] = mean_of(values > upper, mask)
    metrics["fraction_low"] = 0.0 if lower is None else mean_of(values < lower, mask)
    return metrics


def _rejected_fractions(passes: torch.Tensor, log_ratio: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Returns rejected fractions of response tokens, and of rows with response tokens."""
    has_tokens = (mask.sum(dim=-1) > 0).float()
    row_passes = (passes | ~mask.bool()).all(dim=-1).to(log_ratio.dtype)
    return {
        "masked_fraction": masked_mean(1 - passes.to(log_ratio.dtype), mask).item(),
        "seq_masked_fraction": (((1.0 - row_passes) * has_tokens).sum() / has_tokens.sum()).item(),
    }
