"""Rules measure the units of one block, and log ratios become importance weights, bounded by the rules.

A rule measures by its estimator, aggregates over the unit, and compares with inclusive bounds. A weight is
w = exp(clamp(L, ±20)), where L is a token's log ratio ℓ, or Σℓ of its turn or sequence, or the mean of ℓ over the
sequence at level ``geometric``. The clamp is verl's (``SAFETY_BOUND`` in trainer/ppo/rollout_corr_helper.py, 0.9.1).

Contract: nothing is communicated but by the units' own reductions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from mock_scheduler.correction.config.rules import LOG_RATIO_BOUND, CorrectionSpec, Rule
from mock_scheduler.correction.engine.tokens import ResponseTokens
from mock_scheduler.correction.engine.units import Leveled, Units

_CONDITIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "positive_advantage": lambda advantages: advantages > 0,
    "negative_advantage": lambda advantages: advantages < 0,
    "not_positive_advantage": lambda advantages: advantages <= 0,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredRule:
    """Holds the measures of one rule, and the units outside its bounds.

    values: float64 of tokens ``[M]``, or of the runs ``[R]`` of ``units``; logarithms for the estimator ``ratio``.
    is_outside: bool of the same shape.
    rejected: bool, of the same or of other units; ``None`` where the rule does not reject.
    """

    rule: Rule
    units: Units | None
    values: torch.Tensor
    is_outside: torch.Tensor
    rejected: Leveled | None


def measure_rule(rule: Rule, tokens: ResponseTokens, units: Units | None, *, sequences: Units) -> MeasuredRule:
    """Measures the units of one rule. Collective where the units are shared.

    Args:
        rule: A rule of any action but ``truncate`` and ``clip``.
        tokens: The block's response tokens.
        units: The units of the rule's level; ``None``: every token is one.
        sequences: The block's sequences.
    """
    values = _estimate(rule, tokens)
    if units is not None:
        # The sum of a unit is over its tokens in order, so the order of tokens is part of the result.
        values = units.reduce(values, "max" if rule.effective_aggregation == "max" else "sum")
        if rule.effective_aggregation == "mean":
            values = values / units.counts().clamp(min=1.0)
    is_outside = _is_outside(values, rule, tokens.dtype)
    if units is not None and units.has_unknown is not None:
        # A unit whose measure is not known is treated as one that is outside.
        is_outside = is_outside | units.has_unknown
    # The condition is on the sum of a unit's advantages.
    if rule.when != "always":
        assert tokens.advantages is not None
        advantages = tokens.advantages if units is None else units.reduce(tokens.advantages)
        is_outside = is_outside & _CONDITIONS[rule.when](advantages)
    return MeasuredRule(
        rule=rule,
        units=units,
        values=values if units is None else units.of_runs(values),
        is_outside=is_outside if units is None else units.of_runs(is_outside),
        rejected=_find_rejected(rule, is_outside, units, sequences),
    )


def _find_rejected(rule: Rule, is_outside: torch.Tensor, units: Units | None, sequences: Units) -> Leveled | None:
    """The units rejected by the rule, for ``is_outside`` of all its units; ``None`` where it does not reject."""
    if not rule.rejects:
        return None
    if units is None and rule.action == "reject_token":
        return Leveled(values=is_outside, units=None)
    if units is sequences or (units is not None and rule.action == "reject_token"):
        return Leveled(values=units.of_runs(is_outside), units=units)
    by_token = is_outside if units is None else units.spread(is_outside)
    return Leveled(values=sequences.reduce(by_token) > 0, units=sequences)


def _estimate(rule: Rule, tokens: ResponseTokens) -> torch.Tensor:
    """Estimates every token, float64 ``[M]``; ``ratio`` as its logarithm."""
    if rule.estimator == "prob_diff":
        difference = tokens.train.double().exp() - tokens.rollout.double().exp()
        return -difference if rule.reverse else difference
    log_ratio = -tokens.log_ratio if rule.reverse else tokens.log_ratio
    if rule.clamps_tokens:
        log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    match rule.estimator:
        case "ratio":
            # Products and geometric means of ratios are sums and means of logarithms.
            return log_ratio
        case "k1":
            return -log_ratio
        case "k2":
            # k2 = ½ℓ² and k3 = e^ℓ − 1 − ℓ estimate KL(rollout‖train) (joschu.net/blog/kl-approx.html).
            return log_ratio.square().mul_(0.5)
        case _:
            # expm1 keeps the digits of small ℓ that e^ℓ − 1 would lose.
            return log_ratio.expm1().sub_(log_ratio)


def _is_outside(values: torch.Tensor, rule: Rule, dtype: torch.dtype) -> torch.Tensor:
    """Whether values are outside the rule's bounds."""
    # Both sides are rounded to the dtype of weights, so a value at a bound is within: ln 2 is within [0.5, 2].
    rounded = values.to(dtype)
    outside = torch.zeros_like(rounded, dtype=torch.bool)
    for bound, is_beyond in zip(value_bounds(rule), (is_below, is_above), strict=True):
        if bound is not None:
            outside |= is_beyond(rounded, bound)
    return outside


def is_above(values: torch.Tensor, bound: float) -> torch.Tensor:
    """Whether values, float32 or float64, are above the bound, rounded to their dtype."""
    if values.is_cpu:
        # numpy takes a seventh of torch's time.
        array = values.numpy()
        return torch.from_numpy(np.asarray(array > array.dtype.type(bound)))
    return values > torch.tensor(bound, dtype=values.dtype, device=values.device)


def is_below(values: torch.Tensor, bound: float) -> torch.Tensor:
    """Whether values are below the bound, rounded to their dtype."""
    if values.is_cpu:
        array = values.numpy()
        return torch.from_numpy(np.asarray(array < array.dtype.type(bound)))
    return values < torch.tensor(bound, dtype=values.dtype, device=values.device)


def value_bounds(rule: Rule) -> tuple[float | None, float | None]:
    """Returns the bounds of a rule in the units of its measure: logarithms for ratios."""
    if rule.estimator != "ratio":
        return rule.lower, rule.upper
    lower, upper = (None if bound is None else math.log(bound) for bound in (rule.lower, rule.upper))
    return lower, upper


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredWeights:
    """Holds importance weights through all stages; float64 of tokens ``[M]``, or of the runs ``[R]`` of ``units``.

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
