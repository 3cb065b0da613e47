"""From what was measured of a batch to its metric states: one row of sums, maxima and minima per sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mock_scheduler.config.correction.rules import LOG_RATIO_BOUND, CorrectionSpec, Rule
from mock_scheduler.config.correction.verl_keys import VETO
from mock_scheduler.correction.inputs import ResponseTokens, count_positions
from mock_scheduler.correction.states import (
    BUCKET_SUMS,
    LAG_EDGES,
    POSITION_EDGES,
    CorrectionStates,
    FloatArray,
)
from mock_scheduler.correction.units import Reduction, reduce_runs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredRule:
    """``[M]``: values, float64, of each token's unit (a ratio's logarithm); is_outside, rejected: bool."""

    rule: Rule
    values: torch.Tensor
    is_outside: torch.Tensor
    rejected: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredWeights:
    """float64 ``[M]``: logarithms without a clamp, raw weights, those that the rules left, and those divided by their
    mean, ``factor``; ``None`` without batch normalisation."""

    log_weights: torch.Tensor
    raw: torch.Tensor
    bounded: torch.Tensor
    applied: torch.Tensor
    factor: float | None


class _Rows:
    """Columns of sums, maxima and minima, each reduced as it comes, so that no token value is kept."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self._lengths = lengths
        self.columns: dict[Reduction, dict[str, FloatArray]] = {"sum": {}, "max": {}, "min": {}}

    def add(self, name: str, values: torch.Tensor, *reductions: Reduction) -> None:
        for reduction in reductions or ("sum",):
            self.columns[reduction][name] = reduce_runs(values, self._lengths, reduction).cpu().numpy()

    def add_moments(self, name: str, values: torch.Tensor) -> None:
        """Sum, largest and smallest, and the sum of squares."""
        self.add(name, values, "sum", "max", "min")
        self.add(f"{name}_squared", values.square())


def rule_key(index: int, rule: Rule) -> str:
    """The prefix of a rule's columns; two rules of one label stay apart."""
    return f"rule{index}:{rule.label}"


def collect_states(
    tokens: ResponseTokens,
    spec: CorrectionSpec,
    measured: Sequence[MeasuredRule],
    weights: MeasuredWeights | None,
    kept: torch.Tensor,
) -> CorrectionStates:
    """The states of a batch, on the CPU."""
    rows = _Rows(tokens.lengths)
    k3 = tokens.log_ratio.expm1() - tokens.log_ratio
    _add_policies(rows, tokens, k3, kept)
    if weights is not None:
        _add_weights(rows, weights, spec, kept, tokens.dtype)
    for index, item in enumerate(measured):
        _add_rule(rows, rule_key(index, item.rule), item, tokens.dtype)
    by_rules = [item.rejected for item in measured if item.rejected is not None and item.rule.name != VETO]
    if by_rules:
        rows.add("rs_rejected", torch.stack(by_rules).any(dim=0))
    bounded = None if weights is None else weights.bounded
    summed = list(_bucket_values(tokens, k3, bounded, kept))
    return CorrectionStates(
        sums=rows.columns["sum"],
        maxima=rows.columns["max"],
        minima=rows.columns["min"],
        positions=_by_bucket(tokens, _positions(tokens), POSITION_EDGES, summed),
        lags=None
        if tokens.versions_behind is None
        else _by_bucket(tokens, tokens.versions_behind.long(), LAG_EDGES, summed),
        log_weights=np.empty(0, dtype=np.float32) if weights is None else weights.log_weights.float().cpu().numpy(),
    )


def _add_policies(rows: _Rows, tokens: ResponseTokens, k3: torch.Tensor, kept: torch.Tensor) -> None:
    rows.add("tokens", torch.ones_like(tokens.log_ratio))
    for name, sequences in (("unknown", tokens.unknown.sequence), ("assumed", tokens.assumed)):
        counts = torch.bincount(sequences, minlength=tokens.num_sequences)
        rows.columns["sum"][name] = counts.double().cpu().numpy()
    rows.add("kept", kept)
    rows.add("train", tokens.train)
    rows.add("rollout", tokens.rollout)
    rows.add("log_ratio", tokens.log_ratio, "sum", "max", "min")
    rows.add("k3", k3)
    rows.add("kept_k3", torch.where(kept, k3, 0.0))
    clamped = tokens.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    rows.add("ratio_squared", (2.0 * clamped).exp())
    train, rollout = tokens.train.exp(), tokens.rollout.exp()
    difference = (train - rollout).abs()
    rows.add("prob_diff", difference, "sum", "max")
    rows.add("prob_diff_squared", difference.square())
    for name, values in (
        ("train_prob", train),
        ("rollout_prob", rollout),
        ("train_prob_squared", train.square()),
        ("rollout_prob_squared", rollout.square()),
        ("prob_product", train * rollout),
    ):
        rows.add(name, values)


def _add_weights(
    rows: _Rows, weights: MeasuredWeights, spec: CorrectionSpec, kept: torch.Tensor, dtype: torch.dtype
) -> None:
    rounded = weights.raw.to(dtype)
    lower, upper = spec.weight_bounds
    rows.add_moments("raw", weights.raw)
    rows.add_moments("bounded", weights.bounded)
    rows.add_moments("applied", torch.where(kept, weights.applied, 0.0))
    rows.add("log_weight", weights.log_weights, "max", "min")
    if upper is not None:
        rows.add("raw_high", rounded > upper)
        # The guide's revision measured truncated weights, clamped from below as well.
        banded = weights.raw.clamp(min=lower, max=upper)
        rows.add_moments("banded", banded)
    if lower is not None:
        rows.add("raw_low", rounded < lower)
    rows.add("zeroed", weights.bounded == 0.0)
    if weights.factor is not None:
        factor = torch.full((1,), weights.factor, dtype=torch.float64)
        num_rows = len(rows.columns["sum"]["tokens"])
        rows.columns["max"]["factor"] = factor.expand(num_rows).numpy().copy()


def _add_rule(rows: _Rows, key: str, item: MeasuredRule, dtype: torch.dtype) -> None:
    """Values of units are repeated for their tokens; those of ratios are logarithms here."""
    rule = item.rule
    rows.add_moments(key, item.values)
    lower, upper = value_bounds(rule)
    rounded = item.values.to(dtype)
    if upper is not None:
        rows.add(f"{key}:high", rounded > torch.tensor(upper, dtype=dtype, device=rounded.device))
    if lower is not None:
        rows.add(f"{key}:low", rounded < torch.tensor(lower, dtype=dtype, device=rounded.device))
    rows.add(f"{key}:outside", item.is_outside, "sum", "max")
    if item.rejected is not None:
        rows.add(f"{key}:rejected", item.rejected, "sum", "max")
    floor = 0.0 if lower is None and rule.estimator in ("k2", "k3") else lower
    clamped = item.values.clamp(min=floor, max=upper)
    rows.add(f"{key}:clamped", clamped)
    rows.add(f"{key}:clamped_squared", clamped.square())
    if rule.estimator == "ratio":
        ratio = item.values.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        rows.add_moments(f"{key}:ratio", ratio)
        rows.add_moments(f"{key}:banded", ratio.clamp(min=rule.lower, max=rule.upper))


def value_bounds(rule: Rule) -> tuple[float | None, float | None]:
    """The bounds in the units of the values: logarithms for ratios."""
    if rule.estimator != "ratio":
        return rule.lower, rule.upper
    lower, upper = (None if bound is None else math.log(bound) for bound in (rule.lower, rule.upper))
    return lower, upper


def _bucket_values(
    tokens: ResponseTokens, k3: torch.Tensor, weights: torch.Tensor | None, kept: torch.Tensor
) -> Iterator[torch.Tensor]:
    """What ``BUCKET_SUMS`` names."""
    ones = torch.ones_like(tokens.log_ratio)
    yield ones
    yield tokens.log_ratio
    yield k3
    applied = ones if weights is None else weights
    yield applied
    yield applied.square()
    yield (~kept).double()


def _positions(tokens: ResponseTokens) -> torch.Tensor:
    """Which response token of its sequence each is, int64 ``[M]``."""
    if tokens.positions is not None:
        return tokens.positions.long()
    return count_positions(tokens.lengths.to(tokens.log_ratio.device), len(tokens.log_ratio))


def _by_bucket(
    tokens: ResponseTokens, numbers: torch.Tensor, edges: tuple[int, ...], summed: Sequence[torch.Tensor]
) -> FloatArray:
    """Sums per sequence and bucket, float64 ``[S, len(edges), len(BUCKET_SUMS)]``."""
    limits = torch.tensor(edges[1:], device=numbers.device)
    cells = tokens.sequence() * len(edges) + torch.bucketize(numbers, limits, right=True)
    runs, lengths = torch.unique_consecutive(cells, return_counts=True)
    table = np.zeros((tokens.num_sequences * len(edges), len(BUCKET_SUMS)))
    lengths = lengths.cpu()
    columns = [reduce_runs(values, lengths, "sum").cpu().numpy() for values in summed]
    if columns and len(runs):
        np.add.at(table, runs.cpu().numpy(), np.stack(columns, axis=1))
    return table.reshape(tokens.num_sequences, len(edges), len(BUCKET_SUMS))
