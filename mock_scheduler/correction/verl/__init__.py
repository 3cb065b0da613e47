"""verl's releases of rollout correction, reproduced with their bugs.

Contract: one pure function. Weights and masks are those of the release to the bit, metrics have its names and
definitions, and wrong arguments raise what it raises. ``releases.py`` tells the releases apart, and ``earliest.py`` is
0.6.0 alone, which has other arguments; no other code here knows a release by name. Nothing is repaired:
log-probabilities keep their dtype, NaN at padding reaches the weights, and bounds of k1 are inverted. For right results
use the rules of ``mock_scheduler.correction`` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mock_scheduler.correction.config.rules import VerlRelease
from mock_scheduler.correction.verl.divergence import reject_by_divergence
from mock_scheduler.correction.verl.earliest import weights_of_0_6_0
from mock_scheduler.correction.verl.metrics import policy_metrics
from mock_scheduler.correction.verl.rejection import apply_veto, reject_by_ratio
from mock_scheduler.correction.verl.releases import BEHAVIOURS, Behaviour
from mock_scheduler.correction.verl.weights import importance_weights

__all__ = ["ReleaseCorrection", "correct_as_release"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReleaseCorrection:
    """What a release returns.

    weights: [B, T] in the dtype of the release, ``None`` where it computes none. mask: [B, T], the response mask
    without rejected tokens, in the dtype of the release. metrics: by the release's names, prefix included.
    """

    weights: torch.Tensor | None
    mask: torch.Tensor
    metrics: dict[str, float]


def correct_as_release(
    release: VerlRelease,
    *,
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    arguments: Mapping[str, object],
) -> ReleaseCorrection:
    """Weights, mask and metrics of one verl release, for log-probabilities and a mask of one shape [B, T].

    arguments: by the release's own parameter names; absent ones take its Python defaults. The batch is whole on every
    rank: nothing is communicated, as in verl's driver. Raises what the release raises: ValueError, TypeError,
    ZeroDivisionError, RuntimeError where a bound does not fit the dtype, and for 0.6.0 what ``earliest.py`` says.
    """
    behaviour = BEHAVIOURS[release]
    complete = behaviour.complete(arguments)
    if behaviour.rejects_by == "weight":
        weights, metrics = weights_of_0_6_0(
            behaviour,
            old_log_prob=old_log_prob,
            rollout_log_prob=rollout_log_prob,
            mask=response_mask,
            arguments=complete,
        )
        return ReleaseCorrection(weights=weights, mask=response_mask, metrics=_prefixed(behaviour.prefix, metrics))
    _check_inputs(old_log_prob, rollout_log_prob, response_mask)
    log_ratio = old_log_prob - rollout_log_prob
    weights, metrics = None, {}
    if complete["rollout_is"] is not None and complete["rollout_is_threshold"] is not None:
        weights, metrics = importance_weights(behaviour, log_ratio, response_mask, complete)
    mask, rejection = _reject(behaviour, log_ratio, response_mask, complete)
    policies = policy_metrics(old_log_prob, rollout_log_prob, response_mask, has_chi2=behaviour.has_chi2)
    metrics = metrics | rejection | _prefixed(behaviour.policy_prefix, policies)
    return ReleaseCorrection(weights=weights, mask=mask, metrics=_prefixed(behaviour.prefix, metrics))


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
