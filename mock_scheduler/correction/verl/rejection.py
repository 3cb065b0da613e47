"""Rejection by ratio and the veto of revision e7cdce1c and 0.6.1.

Contract: pure functions. Kept: a mask that is not of floats becomes float32 where something is rejected or vetoed.
"""

from __future__ import annotations

import torch

from mock_scheduler.correction.verl.arguments import read_choice, read_number, read_positive
from mock_scheduler.correction.verl.masked import compute_ratios, masked_mean, masked_sum, mean_of
from mock_scheduler.correction.verl.metrics import MeasuredRatios, ratio_metrics
from mock_scheduler.correction.verl.releases import Behaviour

_LEVELS = frozenset({"token", "sequence", "geometric"})


def reject_by_ratio(
    behaviour: Behaviour, log_ratio: torch.Tensor, mask: torch.Tensor, arguments: dict[str, object]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The mask [B, T] without what lies outside [lower, upper], both inclusive, and metrics ``rollout_rs_*``.

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
    """Fractions of tokens, and of all rows, that ``kept`` (float [B, T], 0 or 1) leaves out."""
    rows = masked_sum(1 - kept, mask, -1) > 0 if level == "token" else 1 - kept[:, 0]
    return {
        f"{name}_masked_fraction": masked_mean(1 - kept, mask).item(),
        f"{name}_seq_masked_fraction": rows.float().mean().item(),
    }


def veto_rows(log_ratio: torch.Tensor, mask: torch.Tensor, threshold: float) -> tuple[torch.Tensor, dict[str, float]]:
    """Float32 [B, 1], 0 for rows with a response token of ratio strictly below ``threshold``; and metrics.

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
