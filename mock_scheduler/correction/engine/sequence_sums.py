"""Sums the states of one block, for metrics: one row of sums, maxima and minima per sequence.

A value shared by all tokens of a unit is summed as the value times their number, without a value per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.correction.config.rules import LOG_RATIO_BOUND, CorrectionSpec, Rule
from mock_scheduler.correction.config.verl_keys import VETO
from mock_scheduler.correction.engine.buckets import BucketValues, lag_runs, position_runs, sum_by_bucket
from mock_scheduler.correction.engine.measures import MeasuredRule, MeasuredWeights, is_above, is_below, value_bounds
from mock_scheduler.correction.engine.states import CorrectionStates, FloatArray
from mock_scheduler.correction.engine.tokens import ResponseTokens
from mock_scheduler.correction.engine.units import Leveled, Reduction, Units, any_of


class _Rows:
    """Columns of sums, maxima and minima, each reduced as it comes, without keeping token values."""

    def __init__(self, sequences: Units) -> None:
        self._sequences = sequences
        self._scratch: torch.Tensor | None = None
        self._store = np.empty((0, 0))
        self._num_free = 0
        self.columns: dict[Reduction, dict[str, FloatArray]] = {"sum": {}, "max": {}, "min": {}}

    def add(self, name: str, values: torch.Tensor, *reductions: Reduction, units: Units | None = None) -> None:
        """Reduces values of tokens, or of the runs of ``units``, over each sequence."""
        reductions = reductions or ("sum",)
        if units is None:
            columns = self._sequences.runs.reduce_to_arrays(values, reductions)
        else:
            columns = [units.by_sequence(values, reduction).cpu().numpy() for reduction in reductions]
        for reduction, column in zip(reductions, columns, strict=True):
            self.columns[reduction][name] = self._kept(column)

    def _kept(self, column: FloatArray) -> FloatArray:
        # Small arrays that outlive large ones would leave the freed memory in pieces, so they share one store.
        if self._num_free == 0:
            self._store, self._num_free = np.empty((64, len(column))), 64
        self._num_free -= 1
        stored: FloatArray = self._store[self._num_free]
        stored[:] = column
        return stored

    def add_moments(self, name: str, values: torch.Tensor, *, units: Units | None = None) -> None:
        """Adds the sum, the largest, the smallest, and the sum of squares."""
        self.add(name, values, "sum", "max", "min", units=units)
        self.add_squares(name, values, units=units)

    def add_squares(self, name: str, values: torch.Tensor, *, units: Units | None = None) -> None:
        """Adds the sum of squares."""
        if self._scratch is None or self._scratch.shape != values.shape:
            self._scratch = torch.empty_like(values)
        self.add(f"{name}_squared", torch.square(values, out=self._scratch), units=units)

    def add_moments_of_kept(self, name: str, values: torch.Tensor, kept: torch.Tensor, *, units: Units) -> None:
        """Adds moments of values ``[R]``, with 0 for tokens ``[M]`` that are not kept."""
        # A sequence with all of its tokens gets the bits of ``add_moments``: losses of others must not touch its sums.
        counts = units.runs.reduce(kept, "sum")
        has_kept, has_lost = counts > 0, counts < units.runs.counts(counts.device)
        largest, smallest = torch.where(has_kept, values, -math.inf), torch.where(has_kept, values, math.inf)
        columns: tuple[tuple[Reduction, str, torch.Tensor], ...] = (
            ("sum", name, values),
            ("sum", f"{name}_squared", values.square()),
            ("max", name, torch.where(has_lost, largest.clamp(min=0.0), largest)),
            ("min", name, torch.where(has_lost, smallest.clamp(max=0.0), smallest)),
        )
        for reduction, column, of_runs in columns:
            self.columns[reduction][column] = units.by_sequence(of_runs, reduction, counts=counts).cpu().numpy()

    def repeat(self, name: str, of: str) -> None:
        """Gives ``name`` the columns of ``of``, for equal values."""
        for columns in self.columns.values():
            if of in columns:
                columns[name] = columns[of]

    def repeat_moments(self, name: str, of: str) -> None:
        """Repeats the columns, and the sum of squares."""
        self.repeat(name, of)
        self.repeat(f"{name}_squared", f"{of}_squared")


def rule_key(index: int, rule: Rule) -> str:
    """Returns the prefix of a rule's columns; two rules of one label stay apart."""
    return f"rule{index}:{rule.label}"


def collect_states(
    tokens: ResponseTokens,
    spec: CorrectionSpec,
    measured: Mapping[int, MeasuredRule],
    weights: MeasuredWeights | None,
    kept: Leveled,
    *,
    sequences: Units,
) -> CorrectionStates:
    """Collects the states of a block, on the CPU. measured: by the rule's place in ``spec.rules``."""
    rows = _Rows(sequences)
    k3 = tokens.log_ratio.expm1().sub_(tokens.log_ratio)
    _add_policies(rows, tokens, k3, kept)
    if weights is not None:
        _add_weights(rows, weights, spec, kept, tokens.dtype)
    if weights is not None and weights.log_weights is tokens.log_ratio:
        rows.repeat("ratio_squared", "raw_squared")
    else:
        rows.add("ratio_squared", tokens.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp_().square_())
    _add_rules(rows, spec, measured, tokens.dtype)
    bounded = None if weights is None else Leveled(values=weights.bounded, units=weights.units)
    summed = BucketValues(log_ratio=tokens.log_ratio, k3=k3, weights=bounded, kept=kept)
    return CorrectionStates(
        sums=rows.columns["sum"],
        maxima=rows.columns["max"],
        minima=rows.columns["min"],
        positions=sum_by_bucket(position_runs(tokens), summed, sequences=sequences),
        lags=None if tokens.versions_behind is None else sum_by_bucket(lag_runs(tokens), summed, sequences=sequences),
        log_weights=np.empty(0, dtype=np.float32) if weights is None else _log_weights(weights),
    )


def _log_weights(weights: MeasuredWeights) -> npt.NDArray[np.float32]:
    rounded = Leveled(values=weights.log_weights.float(), units=weights.units)
    return rounded.by_token().cpu().numpy()


def _add_policies(rows: _Rows, tokens: ResponseTokens, k3: torch.Tensor, kept: Leveled) -> None:
    sums = rows.columns["sum"]
    sums["tokens"] = tokens.lengths.double().numpy()
    for name, sequences in (("unknown", tokens.unknown.sequence), ("assumed", tokens.assumed)):
        sums[name] = torch.bincount(sequences, minlength=tokens.num_sequences).double().cpu().numpy()
    rows.add("kept", kept.values, units=kept.units)
    rows.add("log_ratio", tokens.log_ratio, "sum", "max", "min")
    rows.add("k3", k3)
    if bool(kept.values.all()):
        sums["kept_k3"] = sums["k3"]
    else:
        rows.add("kept_k3", torch.where(kept.by_token(), k3, 0.0))
    # Written in place: memory that is still in the cache is several times as fast as new memory.
    train, rollout = tokens.train.double(), tokens.rollout.double()
    rows.add("train", train)
    rows.add("rollout", rollout)
    train, rollout = _exp_of_own(train, of=tokens.train), _exp_of_own(rollout, of=tokens.rollout)
    difference = (train - rollout).abs_()
    rows.add("prob_diff", difference, "sum", "max")
    rows.add("prob_diff_squared", difference.square_())
    rows.add("prob_product", torch.mul(train, rollout, out=difference))
    rows.add("train_prob", train)
    rows.add("rollout_prob", rollout)
    rows.add("train_prob_squared", train.square_())
    rows.add("rollout_prob_squared", rollout.square_())


def _exp_of_own(values: torch.Tensor, *, of: torch.Tensor) -> torch.Tensor:
    """The exponential, in place unless the values are the caller's own."""
    return values.exp() if values is of else values.exp_()


def _add_weights(
    rows: _Rows, weights: MeasuredWeights, spec: CorrectionSpec, kept: Leveled, dtype: torch.dtype
) -> None:
    units = weights.units
    rounded = weights.raw.to(dtype)
    lower, upper = spec.weight_bounds
    rows.add_moments("raw", weights.raw, units=units)
    rows.add_moments("bounded", weights.bounded, units=units)
    _add_applied(rows, weights, kept)
    rows.add("log_weight", weights.log_weights, "max", "min", units=units)
    if upper is not None:
        rows.add("raw_high", is_above(rounded, upper), units=units)
        # The guide's revision measured truncated weights, clamped from below as well.
        if _is_bounded_alike(weights, spec):
            rows.repeat_moments("banded", "bounded")
        else:
            rows.add_moments("banded", weights.raw.clamp(min=lower, max=upper), units=units)
    if lower is not None:
        rows.add("raw_low", is_below(rounded, lower), units=units)
    if bool((rows.columns["min"]["bounded"] > 0.0).all()):
        rows.columns["sum"]["zeroed"] = np.zeros_like(rows.columns["sum"]["bounded"])
    else:
        rows.add("zeroed", weights.bounded == 0.0, units=units)
    if weights.factor is not None:
        rows.columns["max"]["factor"] = np.full(len(rows.columns["sum"]["tokens"]), weights.factor)


def _is_bounded_alike(weights: MeasuredWeights, spec: CorrectionSpec) -> bool:
    """Whether the rules only cut raw weights at ``weight_bounds``."""
    cuts = [(rule.lower, rule.upper) for rule in spec.rules if rule.action in ("truncate", "clip")]
    is_zeroed = any(rule.action == "zero_weight" for rule in spec.rules)
    has_unknown = weights.units is not None and weights.units.has_unknown is not None
    return cuts == [spec.weight_bounds] and not (is_zeroed or has_unknown) and spec.release is None


def _add_applied(rows: _Rows, weights: MeasuredWeights, kept: Leveled) -> None:
    """Adds the weights of the loss: 0 where a token is rejected."""
    units = weights.units
    if bool(kept.values.all()):
        if weights.applied is weights.bounded:
            rows.repeat_moments("applied", "bounded")
        else:
            rows.add_moments("applied", weights.applied, units=units)
    elif units is None or kept.units is units:
        flags = kept.by_token() if units is None else kept.values
        rows.add_moments("applied", torch.where(flags, weights.applied, 0.0), units=units)
    else:
        rows.add_moments_of_kept("applied", weights.applied, kept.by_token(), units=units)


def _add_rules(rows: _Rows, spec: CorrectionSpec, measured: Mapping[int, MeasuredRule], dtype: torch.dtype) -> None:
    """Adds the rejecting rules; the effect of the others is in the weights."""
    rejections: list[Leveled] = []
    for index, item in measured.items():
        key = rule_key(index, item.rule)
        if item.rejected is None:
            continue
        rows.add(f"{key}:rejected", item.rejected.values, units=item.rejected.units)
        if item.rule.name == VETO:
            rows.add(f"{key}:outside", item.is_outside, units=item.units)
            continue
        _add_values(rows, key, item, dtype)
        if item.rule is guide_rule(spec):
            _add_ratios(rows, key, item)
        rejections.append(item.rejected)
    if rejections:
        rejected = any_of(rejections)
        rows.add("rs_rejected", rejected.values, units=rejected.units)


def guide_rule(spec: CorrectionSpec) -> Rule | None:
    """Returns the subject of the guide's metrics of rejection: the first rule against a ratio, but the veto."""
    found = (rule for rule in spec.rules if rule.rejects and rule.name != VETO and rule.estimator == "ratio")
    return next(found, None)


def _add_values(rows: _Rows, key: str, item: MeasuredRule, dtype: torch.dtype) -> None:
    """Adds a rule's values, logarithms for ratios; the value of a unit counts once for each of its tokens."""
    rule, units = item.rule, item.units
    rows.add(key, item.values, "sum", "max", "min", units=units)
    lower, upper = value_bounds(rule)
    rounded = item.values.to(dtype)
    if upper is not None:
        rows.add(f"{key}:high", is_above(rounded, upper), units=units)
    if lower is not None:
        rows.add(f"{key}:low", is_below(rounded, lower), units=units)
    floor = 0.0 if lower is None and rule.estimator in ("k2", "k3") else lower
    clamped = item.values.clamp(min=floor, max=upper)
    rows.add(f"{key}:clamped", clamped, units=units)
    rows.add_squares(f"{key}:clamped", clamped, units=units)


def _add_ratios(rows: _Rows, key: str, item: MeasuredRule) -> None:
    ratio = item.values.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp_()
    rows.add(f"{key}:ratio", ratio, "sum", "max", "min", units=item.units)
    banded = ratio.clamp(min=item.rule.lower, max=item.rule.upper)
    rows.add_moments(f"{key}:banded", banded, units=item.units)
