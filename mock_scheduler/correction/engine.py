"""Rollout correction as one pure function: log-probabilities and a mask in, weights, a mask and metric states out.

Contract: nothing is drawn, nothing is written to the inputs, and nothing has a gradient. An empty batch, one without
response tokens and one that is rejected as a whole are ordinary inputs. The only communication is over the groups that
are given: ``context_group`` for units that ranks share, ``batch_group`` for the mean of batch normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

import torch
import torch.distributed as dist

from mock_scheduler.config.correction.rules import LOG_RATIO_BOUND, CorrectionSpec, Level, Rule
from mock_scheduler.correction.collecting import MeasuredRule, MeasuredWeights, collect_states, value_bounds
from mock_scheduler.correction.inputs import (
    CorrectionInputs,
    CorrectionResult,
    ResponseTokens,
    check_inputs,
    read_tokens,
)
from mock_scheduler.correction.releases import correct_inputs_as_release
from mock_scheduler.correction.units import Units, sequence_units, turn_units
from mock_scheduler.errors import CorrectionError

#: A mean weight up to this is not divided by, as in verl: all weights are (nearly) 0.
SMALLEST_MEAN_WEIGHT = 1e-8

_CONDITIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "positive_advantage": lambda advantages: advantages > 0,
    "negative_advantage": lambda advantages: advantages < 0,
    "not_positive_advantage": lambda advantages: advantages <= 0,
}


def compute_correction(
    inputs: CorrectionInputs,
    spec: CorrectionSpec,
    *,
    context_group: dist.ProcessGroup | None = None,
    batch_group: dist.ProcessGroup | None = None,
) -> CorrectionResult:
    """Weights and mask of the response tokens, and what metrics are made of.

    context_group: ranks that hold other tokens of the same sequences, of which each must be in one batch_group.
    batch_group: ranks whose weights are normalised together. Every rank of a group must call it.
    With verl's ``release`` set it gives that release's weights and mask instead, on one process, and states of these
    that have nothing of single rules.
    Raises ``CorrectionError``: shapes that do not fit; log-probabilities that are not finite, with ``nan_policy``
    error; advantages or turn numbers that a rule needs and that are not there; more rejected than
    ``max_rejected_fraction``.
    """
    check_inputs(inputs)
    if spec.release is not None:
        _refuse_groups(spec, context_group, batch_group)
        return _correct_as_release(inputs, spec)
    if spec.needs_advantages and inputs.advantages is None:
        raise CorrectionError("rollout correction: a rule asks for the sign of advantages, and none are given")
    tokens = read_tokens(inputs, spec.nan_policy, needs_turns=spec.needs_turns)
    computation = _Computation(tokens, context_group)
    measured = [computation.measure(rule) for rule in spec.rules]
    weights = computation.weights(spec, measured, batch_group) if spec.weight is not None else None
    kept = computation.kept(measured)
    kept_by_token = tokens.with_unknown(kept)
    _check_rejected(spec, kept_by_token, context_group)
    states = collect_states(tokens, spec, measured, weights, kept)
    mask = inputs.response_mask.detach()
    applied = None if weights is None else weights.applied.to(tokens.dtype)
    return CorrectionResult(
        weights=None if applied is None else tokens.spread(applied),
        mask=torch.where(tokens.spread(kept), mask, torch.zeros_like(mask)),
        kept=kept_by_token,
        weights_by_token=None if applied is None else tokens.with_unknown(applied),
        states=states,
    )


def _refuse_groups(spec: CorrectionSpec, *groups: dist.ProcessGroup | None) -> None:
    if any(group is not None and group.size() > 1 for group in groups):
        raise CorrectionError(
            f"verl_compat {spec.release} computes on whole batches of one process; leave the groups out"
        )


def _correct_as_release(inputs: CorrectionInputs, spec: CorrectionSpec) -> CorrectionResult:
    release = correct_inputs_as_release(inputs, spec)
    tokens = read_tokens(inputs, "ratio_one", needs_turns=spec.weight == "segment")
    kept = release.mask.flatten()[tokens.places] != 0
    _check_rejected(spec, kept, None)
    applied = None if release.weights is None else release.weights.flatten()[tokens.places]
    weights = None
    if applied is not None:
        raw = _Computation(tokens, None).weights(replace(spec, batch_normalize=False), [], None)
        weights = replace(raw, bounded=applied.double(), applied=applied.double())
    return CorrectionResult(
        weights=release.weights,
        mask=release.mask,
        kept=kept,
        weights_by_token=applied,
        states=collect_states(tokens, spec, [], weights, kept),
        release_metrics=release.metrics,
    )


def _check_rejected(spec: CorrectionSpec, kept: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    limit = spec.max_rejected_fraction
    if limit is None:
        return
    counts = torch.tensor([int((~kept).sum()), len(kept)], device=kept.device)
    if group is not None and group.size() > 1:
        # One rank alone must not raise: the others would wait for it.
        dist.all_reduce(counts, group=group)
    num_rejected, num_tokens = counts.tolist()
    if num_rejected > limit * num_tokens:
        raise CorrectionError(
            f"rollout correction rejects {num_rejected} of {num_tokens} response tokens, "
            f"{num_rejected / num_tokens:.1%}, above rollout_correction.max_rejected_fraction {limit:g}: the rollout "
            "and the training policy differ too much to train on; look at `mock-scheduler correction`"
        )


class _Computation:
    """One call's tokens, and the units of levels as they are asked for."""

    def __init__(self, tokens: ResponseTokens, group: dist.ProcessGroup | None) -> None:
        self._tokens = tokens
        self._group = group

    @cached_property
    def _sequences(self) -> Units:
        return sequence_units(self._tokens, self._group)

    @cached_property
    def _turns(self) -> Units:
        return turn_units(self._tokens, self._group)

    def _units(self, level: Level) -> Units | None:
        """``None``: every token is a unit."""
        if level == "token":
            return None
        return self._turns if level == "segment" else self._sequences

    def measure(self, rule: Rule) -> MeasuredRule:
        """What a rule measures of its units, and the units that are outside its bounds."""
        tokens, units = self._tokens, self._units(rule.level)
        by_token = _estimate(rule, tokens)
        if units is None:
            values = by_token
        elif rule.effective_aggregation == "max":
            values = units.reduce(by_token, "max")
        else:
            values = units.reduce(by_token)
            if rule.effective_aggregation == "mean":
                values = values / self._counts(units).clamp(min=1.0)
        is_outside = _is_outside(values, rule, tokens.dtype)
        if units is not None and units.has_unknown is not None:
            is_outside = is_outside | units.has_unknown
        if rule.when != "always":
            assert tokens.advantages is not None
            advantages = tokens.advantages if units is None else units.reduce(tokens.advantages)
            is_outside = is_outside & _CONDITIONS[rule.when](advantages)
        spread = units.spread if units is not None else _as_they_are
        return MeasuredRule(
            rule=rule,
            values=spread(values),
            is_outside=spread(is_outside),
            rejected=self._rejected(rule, is_outside, units),
        )

    def _rejected(self, rule: Rule, is_outside: torch.Tensor, units: Units | None) -> torch.Tensor | None:
        if not rule.rejects:
            return None
        if rule.action == "reject_token":
            return is_outside if units is None else units.spread(is_outside)
        if units is self._sequences:
            return units.spread(is_outside)
        by_token = is_outside if units is None else units.spread(is_outside)
        return self._sequences.spread(self._sequences.reduce(by_token) > 0)

    def _counts(self, units: Units) -> torch.Tensor:
        return units.reduce(torch.ones_like(self._tokens.log_ratio))

    def kept(self, measured: list[MeasuredRule]) -> torch.Tensor:
        """bool ``[M]``: tokens that no rule rejects."""
        kept = torch.ones_like(self._tokens.log_ratio, dtype=torch.bool)
        for item in measured:
            if item.rejected is not None:
                kept &= ~item.rejected
        return kept

    def weights(
        self, spec: CorrectionSpec, measured: list[MeasuredRule], group: dist.ProcessGroup | None
    ) -> MeasuredWeights:
        """Importance weights of every token: raw, as the rules leave them, and divided by their mean if so asked."""
        assert spec.weight is not None
        tokens, units = self._tokens, self._units(spec.weight)
        log_weights = tokens.log_ratio
        if units is not None:
            log_weights = units.reduce(log_weights)
            if spec.weight == "geometric":
                log_weights = log_weights / self._counts(units).clamp(min=1.0)
        raw = log_weights.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        if units is not None:
            log_weights, raw = units.spread(log_weights), units.spread(raw)
        bounded = raw
        for item in measured:
            rule = item.rule
            if rule.action in ("truncate", "clip"):
                bounded = bounded.clamp(min=rule.lower, max=rule.upper)
            elif rule.action == "zero_weight":
                bounded = torch.where(item.is_outside, 0.0, bounded)
        if units is not None and units.has_unknown is not None:
            bounded = torch.where(units.spread(units.has_unknown), 0.0, bounded)
        factor = self._mean_weight(bounded, units, spec.weight, group) if spec.batch_normalize else 1.0
        applied = bounded / factor if factor != 1.0 else bounded
        return MeasuredWeights(
            log_weights=log_weights,
            raw=raw,
            bounded=bounded,
            applied=applied,
            factor=factor if spec.batch_normalize else None,
        )

    def _mean_weight(
        self, weights: torch.Tensor, units: Units | None, level: Level, group: dist.ProcessGroup | None
    ) -> float:
        """The mean over tokens at level token, else over sequences of their own means; 1 where it is nearly 0.

        Units that have a token whose ratio is not known are in no mean: their weight is 0 for want of one.
        """
        known = torch.ones_like(weights)
        if units is not None and units.has_unknown is not None:
            known = (~units.spread(units.has_unknown)).double()
        counts, sums = self._sequences.reduce(known), self._sequences.reduce(weights * known)
        if level != "token":
            sums, counts = sums / counts.clamp(min=1.0), (counts > 0).double()
        if group is not None and group.size() > 1:
            both = torch.stack((sums.sum(), counts.sum()))
            dist.all_reduce(both, group=group)
            total, number = both.tolist()
        else:
            total, number = math.fsum(sums.tolist()), math.fsum(counts.tolist())
        mean = total / number if number else 0.0
        return mean if mean > SMALLEST_MEAN_WEIGHT else 1.0


def _as_they_are(values: torch.Tensor) -> torch.Tensor:
    return values


def _estimate(rule: Rule, tokens: ResponseTokens) -> torch.Tensor:
    """float64 ``[M]``: the estimator of every token; for ``ratio`` its logarithm, in which it is aggregated."""
    if rule.estimator == "prob_diff":
        difference = tokens.train.exp() - tokens.rollout.exp()
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
            return 0.5 * log_ratio.square()
        case _:
            return log_ratio.expm1() - log_ratio


def _is_outside(values: torch.Tensor, rule: Rule, dtype: torch.dtype) -> torch.Tensor:
    """Values outside the rule's bounds, both rounded to ``dtype``, so that what is at a bound is within."""
    rounded = values.to(dtype)
    outside = torch.zeros_like(rounded, dtype=torch.bool)
    for bound, is_beyond in zip(value_bounds(rule), (torch.lt, torch.gt), strict=True):
        if bound is not None:
            outside |= is_beyond(rounded, torch.tensor(bound, dtype=dtype, device=rounded.device))
    return outside
