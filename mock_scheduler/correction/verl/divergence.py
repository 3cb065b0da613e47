"""Rejection by k1, k2 and k3 from 0.7.1 on.

Contract: pure functions. Kept: k1 = −ℓ is compared with the logarithms of bounds of the ratio itself, so that ratios in
[1/upper, 1/lower] pass (verl issue 6377); each ℓ is clamped before rows are added; and NaN is rejected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mock_scheduler.correction.verl.arguments import Option, read_options
from mock_scheduler.correction.verl.masked import clamp_log, masked_mean, masked_sum, mean_of
from mock_scheduler.correction.verl.metrics import clamped_std, masked_range, spread_metrics
from mock_scheduler.correction.verl.releases import Behaviour


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Statistic:
    """A statistic and its bounds. per_token [B, T]; of_rows [B], ``None`` for options of tokens; lower: k1 only."""

    per_token: torch.Tensor
    of_rows: torch.Tensor | None
    lower: float | None
    upper: float

    def is_within(self) -> torch.Tensor:
        """Bool [B, T], both bounds inclusive, compared in the statistic's dtype."""
        within = self.per_token <= self.upper
        return within if self.lower is None else within & (self.per_token >= self.lower)


def reject_by_divergence(
    behaviour: Behaviour, log_ratio: torch.Tensor, mask: torch.Tensor, arguments: dict[str, object]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The mask [B, T], in its dtype, of tokens that pass every option, and metrics ``rollout_rs_*``.

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
    """Of response tokens, and of the rows that have any."""
    has_tokens = (mask.sum(dim=-1) > 0).float()
    row_passes = (passes | ~mask.bool()).all(dim=-1).to(log_ratio.dtype)
    return {
        "masked_fraction": masked_mean(1 - passes.to(log_ratio.dtype), mask).item(),
        "seq_masked_fraction": (((1.0 - row_passes) * has_tokens).sum() / has_tokens.sum()).item(),
    }
