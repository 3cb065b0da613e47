"""What is computed of one block of whole sequences: what the rules measure, what they reject, and the weights.

Contract: nothing depends on which other sequences are in the block. The only communication is over the group given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist

from mock_scheduler.correction.config.rules import LOG_RATIO_BOUND, CorrectionSpec, Level, Rule
from mock_scheduler.correction.engine.bounds import is_above, is_below, value_bounds
from mock_scheduler.correction.engine.inputs import CorrectionInputs, CorrectionResult, ResponseTokens, read_tokens
from mock_scheduler.correction.engine.sequence_sums import MeasuredRule, MeasuredWeights, collect_states
from mock_scheduler.correction.engine.units import Leveled, Units, any_of, check_turns, sequence_units, turn_units

_CONDITIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "positive_advantage": lambda advantages: advantages > 0,
    "negative_advantage": lambda advantages: advantages < 0,
    "not_positive_advantage": lambda advantages: advantages <= 0,
}


class BlockComputation:
    """The tokens of ``inputs``, a part of ``batch``, and what is computed of them as it is asked for, each once.

    group: ranks that hold other tokens of the same sequences; all must ask for the same in the same order. Making one
    communicates nothing, and raises ``CorrectionError`` for values that cannot be corrected.
    """

    def __init__(
        self,
        inputs: CorrectionInputs,
        *,
        spec: CorrectionSpec,
        group: dist.ProcessGroup | None,
        batch: CorrectionInputs,
    ) -> None:
        self._inputs = inputs
        self._spec = spec
        self._group = group
        self.tokens = read_tokens(inputs, spec.nan_policy, needs_turns=spec.needs_turns, batch=batch)
        if spec.needs_turns:
            check_turns(self.tokens, group)

    @cached_property
    def sequences(self) -> Units:
        """Those of all levels but token and segment."""
        return sequence_units(self.tokens, self._group)

    @cached_property
    def _turns(self) -> Units:
        return turn_units(self.tokens, self._group)

    @cached_property
    def _measured(self) -> dict[int, MeasuredRule]:
        """By the rule's place; not of those that cut weights, which needs no measure."""
        rules = enumerate(self._spec.rules)
        return {place: self._measure(rule) for place, rule in rules if rule.action not in ("truncate", "clip")}

    def _units(self, level: Level) -> Units | None:
        """``None``: every token is a unit."""
        if level == "token":
            return None
        return self._turns if level == "segment" else self.sequences

    def _measure(self, rule: Rule) -> MeasuredRule:
        """What a rule measures of its units, and the units that are outside its bounds."""
        tokens, units = self.tokens, self._units(rule.level)
        values = _estimate(rule, tokens)
        if units is not None:
            values = units.reduce(values, "max" if rule.effective_aggregation == "max" else "sum")
            if rule.effective_aggregation == "mean":
                values = values / units.counts().clamp(min=1.0)
        is_outside = _is_outside(values, rule, tokens.dtype)
        if units is not None and units.has_unknown is not None:
            is_outside = is_outside | units.has_unknown
        if rule.when != "always":
            assert tokens.advantages is not None
            advantages = tokens.advantages if units is None else units.reduce(tokens.advantages)
            is_outside = is_outside & _CONDITIONS[rule.when](advantages)
        return MeasuredRule(
            rule=rule,
            units=units,
            values=values if units is None else units.of_runs(values),
            is_outside=is_outside if units is None else units.of_runs(is_outside),
            rejected=self._rejected(rule, is_outside, units),
        )

    def _rejected(self, rule: Rule, is_outside: torch.Tensor, units: Units | None) -> Leveled | None:
        if not rule.rejects:
            return None
        if units is None and rule.action == "reject_token":
            return Leveled(values=is_outside, units=None)
        if units is self.sequences or (units is not None and rule.action == "reject_token"):
            return Leveled(values=units.of_runs(is_outside), units=units)
        by_token = is_outside if units is None else units.spread(is_outside)
        return Leveled(values=self.sequences.reduce(by_token) > 0, units=self.sequences)

    @cached_property
    def kept(self) -> Leveled:
        """bool: what no rule rejects; of sequences where these tell all."""
        rejections = [item.rejected for item in self._measured.values() if item.rejected is not None]
        rejected = any_of(rejections) if rejections else None
        if rejected is None or not bool(rejected.values.any()):
            return Leveled(values=torch.ones_like(self.sequences.sequence, dtype=torch.bool), units=self.sequences)
        return Leveled(values=~rejected.values, units=rejected.units)

    # Log-probabilities far apart give infinities, and no warning.
    @np.errstate(all="ignore")
    def result(self, factor: float | None) -> CorrectionResult:
        """Weights divided by ``factor``, where it is not ``None``, the mask, and what metrics are made of."""
        tokens, kept = self.tokens, self.kept.by_token()
        weights = None if self.weights is None else normalise(self.weights, factor)
        applied = None
        if weights is not None:
            applied = Leveled(values=weights.applied.to(tokens.dtype), units=weights.units).by_token()
        mask = self._inputs.response_mask.detach()
        if tokens.is_known is not None or not bool(self.kept.values.all()):
            mask = torch.where(tokens.spread(kept), mask, torch.zeros_like(mask))
        return CorrectionResult(
            weights=None if applied is None else tokens.spread(applied),
            mask=mask,
            kept=tokens.with_unknown(kept),
            weights_by_token=None if applied is None else tokens.with_unknown(applied),
            states=collect_states(tokens, self._spec, self._measured, weights, self.kept, sequences=self.sequences),
        )

    @cached_property
    def weights(self) -> MeasuredWeights | None:
        """Importance weights: raw, and as the rules leave them; not yet divided by their mean."""
        spec = self._spec
        if spec.weight is None:
            return None
        units = self._units(spec.weight)
        log_weights = self.tokens.log_ratio
        if units is not None:
            log_weights = units.reduce(log_weights)
            if spec.weight == "geometric":
                log_weights = log_weights / units.counts().clamp(min=1.0)
        raw = log_weights.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp_()
        if units is not None:
            log_weights, raw = units.of_runs(log_weights), units.of_runs(raw)
        weights = MeasuredWeights(units=units, log_weights=log_weights, raw=raw, bounded=raw, applied=raw, factor=None)
        for place, rule in enumerate(spec.rules):
            if rule.action in ("truncate", "clip"):
                weights = replace(weights, bounded=weights.bounded.clamp(min=rule.lower, max=rule.upper))
            elif rule.action == "zero_weight":
                item = self._measured[place]
                weights = _zero(weights, Leveled(values=item.is_outside, units=item.units))
        if units is not None and units.has_unknown is not None:
            weights = _zero(weights, Leveled(values=units.of_runs(units.has_unknown), units=units))
        return replace(weights, applied=weights.bounded)

    @np.errstate(all="ignore")
    def weight_sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 ``[S]`` each: what to sum for the numerator and for the denominator of the mean weight.

        Units that have a token whose ratio is not known are in no mean: their weight is 0 for want of one.
        Collective where a group was given.
        """
        assert self.weights is not None
        bounded = Leveled(values=self.weights.bounded, units=self.weights.units).by_token()
        units = self._units(self._spec.weight) if self._spec.weight is not None else None
        known = torch.ones_like(bounded)
        if units is not None and units.has_unknown is not None:
            known = (~units.spread(units.has_unknown)).double()
        counts, sums = self.sequences.reduce(known), self.sequences.reduce(bounded * known)
        if self._spec.weight == "token":
            return sums, counts
        return sums / counts.clamp(min=1.0), (counts > 0).double()


def _zero(weights: MeasuredWeights, flags: Leveled) -> MeasuredWeights:
    """The weights with 0 where flagged; per token where the flags are not of the weights' own units."""
    if flags.units is not weights.units:
        log_weights, raw, bounded = (
            Leveled(values=values, units=weights.units).by_token()
            for values in (weights.log_weights, weights.raw, weights.bounded)
        )
        weights = replace(weights, units=None, log_weights=log_weights, raw=raw, bounded=bounded)
    by_unit = flags.values if flags.units is weights.units else flags.by_token()
    return replace(weights, bounded=torch.where(by_unit, 0.0, weights.bounded))


def normalise(weights: MeasuredWeights, factor: float | None) -> MeasuredWeights:
    """Weights divided by their mean; as they are where it is ``None``."""
    applied = weights.bounded if factor is None or factor == 1.0 else weights.bounded / factor
    return replace(weights, applied=applied, factor=factor)


def _estimate(rule: Rule, tokens: ResponseTokens) -> torch.Tensor:
    """float64 ``[M]``: the estimator of every token; for ``ratio`` its logarithm, in which it is aggregated."""
    if rule.estimator == "prob_diff":
        difference = tokens.train.double().exp() - tokens.rollout.double().exp()
        return -difference if rule.reverse else difference
    log_ratio = -tokens.log_ratio if rule.reverse else tokens.log_ratio
    if rule.clamps_tokens:
        log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    match rule.estimator:
        case "ratio":
            return log_ratio
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square().mul_(0.5)
        case _:
            return log_ratio.expm1().sub_(log_ratio)


def _is_outside(values: torch.Tensor, rule: Rule, dtype: torch.dtype) -> torch.Tensor:
    """Values outside the rule's bounds, both rounded to ``dtype``, so that what is at a bound is within."""
    rounded = values.to(dtype)
    outside = torch.zeros_like(rounded, dtype=torch.bool)
    for bound, is_beyond in zip(value_bounds(rule), (is_below, is_above), strict=True):
        if bound is not None:
            outside |= is_beyond(rounded, bound)
    return outside
