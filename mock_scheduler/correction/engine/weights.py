"""Importance weights of one block: the exponential of the log ratio of a token, a turn or a sequence, then bounded.

w = exp(clamp(L, ±20)), where L is a token's log ratio ℓ, or Σℓ of its turn or sequence, or the mean of ℓ over the
sequence at level ``geometric``. The clamp is verl's (``SAFETY_BOUND`` in trainer/ppo/rollout_corr_helper.py, 0.9.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from mock_scheduler.correction.config.rules import LOG_RATIO_BOUND, CorrectionSpec
from mock_scheduler.correction.engine.rule_measures import MeasuredRule
from mock_scheduler.correction.engine.tokens import ResponseTokens
from mock_scheduler.correction.engine.units import Leveled, Units


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredWeights:
    """Importance weights through all stages; float64 of tokens ``[M]``, or of the runs ``[R]`` of ``units``.

    log_weights: logarithms, without a clamp. raw: exponentials of the clamped logarithms. bounded: after the rules.
    applied: bounded weights divided by ``factor``, their mean. factor: ``None`` without batch normalisation.
    """

    units: Units | None
    log_weights: torch.Tensor
    raw: torch.Tensor
    bounded: torch.Tensor
    applied: torch.Tensor
    factor: float | None


def weigh(
    tokens: ResponseTokens, units: Units | None, spec: CorrectionSpec, measured: Mapping[int, MeasuredRule]
) -> MeasuredWeights:
    """Computes the weights of ``spec.weight``, as its rules leave them. Collective where the units are shared.

    Args:
        tokens: The block's response tokens.
        units: The units of the level ``spec.weight``; ``None``: every token is one.
        spec: The rules, which act in their order.
        measured: By the rule's place in ``spec.rules``; it has all that make weights 0.
    """
    log_weights = tokens.log_ratio
    if units is not None:
        log_weights = units.reduce(log_weights)
        if spec.weight == "geometric":
            log_weights = log_weights / units.counts().clamp(min=1.0)
    # Clamped after the sum: a sequence of many small ratios may reach the bound.
    raw = log_weights.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp_()
    if units is not None:
        log_weights, raw = units.of_runs(log_weights), units.of_runs(raw)
    weights = MeasuredWeights(units=units, log_weights=log_weights, raw=raw, bounded=raw, applied=raw, factor=None)
    for place, rule in enumerate(spec.rules):
        # Each acts on the weights that the rules before it left: a clip lifts a zeroed weight to its lower bound.
        if rule.action in ("truncate", "clip"):
            weights = replace(weights, bounded=weights.bounded.clamp(min=rule.lower, max=rule.upper))
        elif rule.action == "zero_weight":
            item = measured[place]
            weights = _zero(weights, Leveled(values=item.is_outside, units=item.units))
    if units is not None and units.has_unknown is not None:
        # The weight of a unit with an unknown ratio is not known, so the loss must not see one.
        weights = _zero(weights, Leveled(values=units.of_runs(units.has_unknown), units=units))
    return replace(weights, applied=weights.bounded)


def _zero(weights: MeasuredWeights, flags: Leveled) -> MeasuredWeights:
    """Makes flagged weights 0; the weights become one per token where the flags are not of their own units."""
    if flags.units is not weights.units:
        # Tokens of one unit may now have different weights.
        log_weights, raw, bounded = (
            Leveled(values=values, units=weights.units).by_token()
            for values in (weights.log_weights, weights.raw, weights.bounded)
        )
        weights = replace(weights, units=None, log_weights=log_weights, raw=raw, bounded=bounded)
    by_unit = flags.values if flags.units is weights.units else flags.by_token()
    return replace(weights, bounded=torch.where(by_unit, 0.0, weights.bounded))


def normalise(weights: MeasuredWeights, factor: float | None) -> MeasuredWeights:
    """Divides bounded weights by ``factor``, their mean over the batch; ``None`` leaves them."""
    applied = weights.bounded if factor is None or factor == 1.0 else weights.bounded / factor
    return replace(weights, applied=applied, factor=factor)
