"""verl 0.6.0: weights only. It rejects by weights of 0 and leaves the mask, so that the loss still counts the tokens.

Contract: pure function. Kept: a veto that is on by default; quantiles, which torch refuses in half precision and above
16 million tokens (RuntimeError); an all-zero mask that fails an assertion.
"""

from __future__ import annotations

import torch

from mock_scheduler.correction.verl.arguments import read_choice, read_number
from mock_scheduler.correction.verl.masked import compute_ratios
from mock_scheduler.correction.verl.metrics import MeasuredRatios, policy_metrics, ratio_metrics
from mock_scheduler.correction.verl.rejection import masked_fractions, veto_rows
from mock_scheduler.correction.verl.releases import Behaviour

_LEVELS = frozenset({"token", "sequence", "geometric"})
_MODES = frozenset({"truncate", "mask"})
_QUANTILES = {"p25": 0.25, "p50": 0.50, "p75": 0.75, "p95": 0.95, "p99": 0.99}


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
    level = read_choice("rollout_is_level", arguments["rollout_is_level"], _LEVELS)
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
    metrics |= {f"rollout_is_{name}": torch.quantile(selected, at).item() for name, at in _QUANTILES.items()}
    if read_choice("rollout_is_mode", arguments["rollout_is_mode"], _MODES) == "truncate":
        weights = ratios.per_token.clamp(max=upper)
    else:
        kept = ((ratios.per_token >= lower) & (ratios.per_token <= upper)).float()
        metrics |= masked_fractions("rollout_is", level, kept, mask)
        weights = ratios.per_token * kept
    policies = policy_metrics(old_log_prob, rollout_log_prob, mask, has_chi2=behaviour.has_chi2)
    metrics |= {f"{behaviour.policy_prefix}{name}": value for name, value in policies.items()}
    return weights * passed * mask, metrics
