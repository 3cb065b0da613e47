"""Rollout correction once more, slowly, in plain Python: what the engine and its metrics are compared with.

It follows the formulas of docs/rollout_correction.md one token at a time, with ``math`` and lists alone, and shares no
code with the package but the rules it is given. Numbers are exact to a few roundings of float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mock_scheduler.correction.config.rules import CorrectionSpec, Rule
from tests.correction.engine.plain_metrics import LIMIT, Token, clamp, limits, mean, plain_metrics


@dataclass(kw_only=True)
class PlainBatch:
    """Rows of one length; ``None`` in the place of what is not given."""

    train: Sequence[Sequence[float]]
    rollout: Sequence[Sequence[float]]
    mask: Sequence[Sequence[float]]
    valid: Sequence[Sequence[bool]] | None = None
    turns: Sequence[Sequence[int]] | None = None
    advantages: Sequence[Sequence[float]] | None = None


@dataclass(kw_only=True)
class PlainResult:
    """Weights (``None`` without) and kept tokens ``[B, T]``, and metrics by our names."""

    weights: list[list[float]] | None
    kept: list[list[bool]]
    metrics: dict[str, float]


def correct_plainly(batch: PlainBatch, spec: CorrectionSpec) -> PlainResult:
    tokens = list(_tokens(batch, spec.nan_policy))
    for index, rule in enumerate(spec.rules):
        _measure(tokens, index, rule)
    factor = None
    if spec.weight is not None:
        factor = _weigh(tokens, spec)
    shape = [[0.0] * len(row) for row in batch.mask]
    weights, kept = [list(row) for row in shape], [[False] * len(row) for row in shape]
    for token in tokens:
        weights[token.row][token.column] = token.applied if token.is_known else 0.0
        kept[token.row][token.column] = token.is_kept
    return PlainResult(
        weights=None if spec.weight is None else weights, kept=kept, metrics=plain_metrics(tokens, spec, factor)
    )


def _tokens(batch: PlainBatch, policy: str) -> Iterable[Token]:
    for row, mask in enumerate(batch.mask):
        run = -1
        for column, value in enumerate(mask):
            if not value:
                continue
            if column == 0 or not mask[column - 1]:
                run += 1
            train, rollout = batch.train[row][column], batch.rollout[row][column]
            is_valid = batch.valid is None or batch.valid[row][column]
            token = Token(
                row=row,
                column=column,
                turn=run if batch.turns is None else batch.turns[row][column],
                train=train,
                rollout=rollout,
                advantage=0.0 if batch.advantages is None else batch.advantages[row][column],
                is_known=is_valid and math.isfinite(train) and math.isfinite(rollout),
            )
            if not token.is_known and policy == "ratio_one":
                known = train if math.isfinite(train) else rollout if is_valid and math.isfinite(rollout) else 0.0
                token.train = token.rollout = known
                token.is_known = True
            yield token


def _units(tokens: list[Token], level: str) -> list[list[Token]]:
    """Tokens of each unit, the unknown ones too."""
    found: dict[tuple[int, ...], list[Token]] = {}
    for token in tokens:
        key: tuple[int, ...] = (token.row,)
        if level == "token":
            key = (token.row, token.column)
        elif level == "segment":
            key = (token.row, token.turn)
        found.setdefault(key, []).append(token)
    return list(found.values())


def _estimate(rule: Rule, token: Token) -> float:
    if rule.estimator == "prob_diff":
        difference = math.exp(token.train) - math.exp(token.rollout)
        return -difference if rule.reverse else difference
    log_ratio = -token.log_ratio if rule.reverse else token.log_ratio
    if rule.clamps_tokens:
        log_ratio = clamp(log_ratio, -LIMIT, LIMIT)
    return {
        "ratio": log_ratio,
        "k1": -log_ratio,
        "k2": log_ratio * log_ratio / 2.0,
        "k3": math.expm1(log_ratio) - log_ratio if log_ratio < 700.0 else math.inf,
    }[rule.estimator]


def _measure(tokens: list[Token], index: int, rule: Rule) -> None:
    low, high = limits(rule)
    for unit in _units(tokens, rule.level):
        known = [token for token in unit if token.is_known]
        if not known:
            continue
        values = [_estimate(rule, token) for token in known]
        value = math.fsum(values)
        if rule.level == "geometric" or (rule.level != "token" and rule.aggregation == "mean"):
            value /= len(known)
        elif rule.level != "token" and rule.aggregation == "max":
            value = max(values)
        is_outside = (low is not None and value < low) or (high is not None and value > high)
        is_outside = is_outside or len(known) < len(unit)
        advantage = math.fsum(token.advantage for token in known)
        is_outside = (
            is_outside
            and {
                "always": True,
                "positive_advantage": advantage > 0,
                "negative_advantage": advantage < 0,
                "not_positive_advantage": advantage <= 0,
            }[rule.when]
        )
        for token in known:
            token.values[index] = value
            if is_outside:
                token.outside.add(index)
    for token in tokens:
        if rule.action == "reject_token" and index in token.outside:
            token.rejecting.add(index)
        if rule.action == "reject_sequence" and any(index in o.outside for o in tokens if o.row == token.row):
            token.rejecting.add(index)


def _weigh(tokens: list[Token], spec: CorrectionSpec) -> float | None:
    assert spec.weight is not None
    in_mean = []
    for unit in _units(tokens, spec.weight):
        known = [token for token in unit if token.is_known]
        if not known:
            continue
        log_weight = math.fsum(token.log_ratio for token in known)
        if spec.weight == "geometric":
            log_weight /= len(known)
        for token in known:
            token.log_weight = log_weight
            token.raw = token.bounded = math.exp(clamp(log_weight, -LIMIT, LIMIT))
            for index, rule in enumerate(spec.rules):
                if rule.action in ("truncate", "clip"):
                    token.bounded = clamp(token.bounded, rule.lower, rule.upper)
                elif rule.action == "zero_weight" and index in token.outside:
                    token.bounded = 0.0
            if len(known) < len(unit):
                token.bounded = 0.0
            else:
                in_mean.append(token)
            token.applied = token.bounded
    if not spec.batch_normalize:
        return None
    rows = {token.row for token in in_mean}
    if spec.weight == "token":
        means = [token.bounded for token in in_mean]
    else:
        means = [mean(token.bounded for token in in_mean if token.row == row) for row in rows]
    factor = mean(means) if means else 0.0
    if factor <= 1e-8:
        return 1.0
    for token in tokens:
        token.applied = token.bounded / factor
    return factor
