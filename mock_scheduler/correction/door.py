"""Corrects rollouts in one call, for any training: plain tensors in, weights, mask and metrics out.

Contract: pure; the same computation as in training, ``engine.compute``. Each preset names its source in
``config.presets``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import ValidationError

from mock_scheduler.config.problems import validation_problems
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.correction.engine.compute import compute_correction
from mock_scheduler.correction.engine.inputs import CorrectionInputs
from mock_scheduler.correction.engine.metrics import result_metrics
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.text import bullet_list


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Correction:
    """Holds the correction of one batch, for the loss and for the log.

    weights: of the inputs' shape, float32 or the wider of the log-probabilities' dtypes, without gradient; 0 outside
        of ``response_mask``; ``None`` where the rules ask for no weights. A token's weight is w = exp(clamp(L, ±20)),
        with ℓ = log π_train − log π_rollout. L is ℓ at level ``token``, Σℓ over the turn or the sequence at levels
        ``segment`` and ``sequence``, and the mean of ℓ over the sequence at level ``geometric`` (verl 0.9.1,
        trainer/ppo/rollout_corr_helper.py). Rules then truncate the weight, or make it 0 outside of bounds (IcePop,
        arXiv 2510.18855).
    mask: ``response_mask`` without rejected tokens, in its own shape and dtype. Rules that reject measure ρ = e^ℓ, or
        k1 = −ℓ, k2 = ½ℓ², k3 = e^ℓ − 1 − ℓ (joschu.net/blog/kl-approx.html), and take units outside of their bounds
        out of the mask.
    metrics: ``rollout_corr/…`` by verl's names and ``mismatch/…`` by the guide's; docs/rollout_correction.md has every
        formula.
    """

    weights: torch.Tensor | None
    mask: torch.Tensor
    metrics: Mapping[str, float]


def correct(
    train_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    correction: str | Mapping[str, object] | CorrectionSpec,
    *,
    cu_seqlens: torch.Tensor | None = None,
    logprob_valid: torch.Tensor | None = None,
    turn_ids: torch.Tensor | None = None,
    versions_behind: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
) -> Correction:
    """Corrects a batch that another policy or engine sampled, by the formulas of ``Correction``.

    Args:
        train_logprobs: Log-probabilities by the training policy before the update, floating ``[B, T]``, or packed
            ``[N]`` with ``cu_seqlens``.
        rollout_logprobs: The engine's log-probabilities of the sampled tokens, floating, of the same shape.
        response_mask: Bool, integer or floating of the same shape, nonzero on response tokens.
        correction: A preset's name; or keys of ``algorithm.rollout_correction``, as ``{"rollout_is": "token",
            "rollout_is_threshold": 2.0}``; or the compiled rules.
        cu_seqlens: Integer ``[S + 1]``, the starts of the S packed sequences, and N.
        logprob_valid: Bool, of the same shape, False where the engine gave no log-probability; ``None``: it gave all.
        turn_ids: Integer ≥ 0, of the same shape, the turn of each token within its sequence; ``None``: each unbroken
            run of response tokens is a turn.
        versions_behind: Integer, of the same shape, the age of the sampling policy in versions, for metrics; negative
            where it is newer than the policy under training.
        advantages: Floating, of the same shape, for rules that ask for their sign.

    Returns:
        The weight of each token's policy loss, the mask of the tokens that count, and metrics.

    Raises:
        ConfigError: An unknown preset, or unusable keys; it lists each.
        CorrectionError: Shapes or dtypes do not fit, a log-probability is not finite (``nan_policy`` error), advantages
            are missing, or more than ``max_rejected_fraction`` is rejected.

    Example:
        >>> import math, torch
        >>> old = torch.tensor([[math.log(0.5), math.log(0.75)]])
        >>> sampled = torch.tensor([[math.log(0.5), math.log(0.25)]])
        >>> found = correct(old, sampled, torch.ones(1, 2, dtype=torch.bool), "decoupled_token_is")
        >>> found.weights
        tensor([[1., 2.]])
        >>> round(found.metrics["rollout_corr/rollout_is_raw_max"], 6)
        3.0
    """
    spec = correction if isinstance(correction, CorrectionSpec) else _compile(correction)
    inputs = CorrectionInputs(
        train_logprobs=train_logprobs,
        rollout_logprobs=rollout_logprobs,
        response_mask=response_mask,
        cu_seqlens=cu_seqlens,
        logprob_valid=logprob_valid,
        turn_ids=turn_ids,
        versions_behind=versions_behind,
        advantages=advantages,
    )
    result = compute_correction(inputs, spec)
    return Correction(weights=result.weights, mask=result.mask, metrics=result_metrics(result, spec))


def _compile(correction: str | Mapping[str, object]) -> CorrectionSpec:
    values = {"preset": correction} if isinstance(correction, str) else dict(correction)
    try:
        return RolloutCorrectionConfig.model_validate(values).spec
    except ValidationError as error:
        problems = [
            f"{key}: {text}" if key else text for key, text in validation_problems(error, RolloutCorrectionConfig)
        ]
        raise ConfigError(f"rollout correction cannot be read:{bullet_list(problems)}") from error
