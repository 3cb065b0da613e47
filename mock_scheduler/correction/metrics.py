"""Metrics of rollout correction, out of states that were merged first.

Contract: pure; every value is a float. Names are those of verl's newest release under ``rollout_corr/`` and those of
the guide under ``mismatch/``, with the right values: sequences without response tokens are in no mean, and fractions
beyond a threshold are of raw weights, not of those already cut at it. What has no value, as the mean of nothing, is
left out. docs/rollout_correction.md has every formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mock_scheduler.config.correction.rules import LOG_RATIO_BOUND, CorrectionSpec, Level, Rule
from mock_scheduler.config.correction.verl_keys import VETO
from mock_scheduler.correction.collecting import rule_key
from mock_scheduler.correction.states import (
    BUCKET_SUMS,
    LAG_EDGES,
    POSITION_EDGES,
    CorrectionStates,
    FloatArray,
    bucket_names,
    exact_sum,
)

NEWEST = "rollout_corr/"
GUIDE = "mismatch/"
QUANTILES = (25, 50, 75, 95, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """States, and which of their sequences have response tokens."""

    states: CorrectionStates
    filled: np.ndarray

    @property
    def num_tokens(self) -> float:
        return self.states.total("tokens")

    def mean(self, name: str) -> float:
        """Mean over response tokens."""
        return self.states.total(name) / max(self.num_tokens, 1.0)

    def row_means(self, name: str) -> FloatArray:
        """The mean of each sequence that has response tokens."""
        return np.asarray(self.rows(name) / self.rows("tokens"))

    def rows(self, name: str) -> FloatArray:
        """The sum of each sequence that has response tokens."""
        return np.asarray(self.states.sums[name][self.filled])


def correction_metrics(states: CorrectionStates, spec: CorrectionSpec) -> dict[str, float]:
    """Every metric of these states; only how many tokens there are where there is none."""
    view = _View(states=states, filled=states.sums["tokens"] > 0)
    counts = _counts(view)
    if view.num_tokens == 0:
        return {f"{NEWEST}{name}": value for name, value in counts.items()}
    policies = dict(_policies(view))
    newest = {**counts, **policies, **dict(_buckets(view, spec))}
    guide = {f"mismatch_{name}": value for name, value in policies.items() if name in _GUIDE_POLICY_NAMES}
    if spec.weight is not None:
        newest |= _weights(view, spec)
        guide |= _guide_weights(view, spec)
    newest |= _rejections(view, spec)
    guide |= _guide_rejections(view, spec)
    for prefix_names in (newest, guide):
        prefix_names |= _veto(view, spec)
    return {f"{NEWEST}{name}": value for name, value in newest.items()} | {
        f"{GUIDE}{name}": value for name, value in guide.items()
    }


_GUIDE_POLICY_NAMES = frozenset(
    (
        *("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "kl", "k3_kl"),
        *("log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio"),
    )
)


def _counts(view: _View) -> dict[str, float]:
    unknown, kept = view.states.total("unknown"), view.states.total("kept")
    every = view.num_tokens + unknown
    return {
        "num_tokens": every,
        "num_sequences": float(view.filled.sum()),
        "kept_fraction": kept / every if every else 0.0,
        "all_rejected": float(kept == 0),
        "rollout_nan_fraction": unknown / every if every else 0.0,
    }


def _policies(view: _View) -> Iterator[tuple[str, float]]:
    """How far the two policies are apart; verl's 13 names, and the differences of probabilities."""
    train, rollout = view.row_means("train"), view.row_means("rollout")
    difference = rollout - train
    yield "training_ppl", _mean(np.exp(-train))
    yield "training_log_ppl", _mean(-train)
    yield "rollout_ppl", _mean(np.exp(-rollout))
    yield "rollout_log_ppl", _mean(-rollout)
    yield "kl", -view.mean("log_ratio")
    yield "k3_kl", view.mean("k3")
    yield "log_ppl_diff", _mean(difference)
    yield "log_ppl_abs_diff", _mean(np.abs(difference))
    yield "log_ppl_diff_max", float(difference.max())
    yield "log_ppl_diff_min", float(difference.min())
    yield "ppl_ratio", _mean(np.exp(difference))
    yield "chi2_token", view.mean("ratio_squared") - 1.0
    clamped = view.rows("log_ratio").clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    yield "chi2_seq", _mean(np.exp(2.0 * clamped)) - 1.0
    yield from _probabilities(view)
    kept = view.states.total("kept")
    rejected = view.num_tokens - kept
    if rejected:
        kept_k3 = view.states.total("kept_k3")
        yield "rejected_k3_kl", (view.states.total("k3") - kept_k3) / rejected
        if kept:
            yield "kept_k3_kl", kept_k3 / kept


def _probabilities(view: _View) -> Iterator[tuple[str, float]]:
    mean = view.mean("prob_diff")
    yield "probs_diff_mean", mean
    yield "probs_diff_max", view.states.largest("prob_diff")
    yield "probs_diff_std", math.sqrt(max(view.mean("prob_diff_squared") - mean * mean, 0.0))
    train, rollout = view.mean("train_prob"), view.mean("rollout_prob")
    spread = [
        max(view.mean(f"{name}_squared") - mean * mean, 0.0)
        for name, mean in (("train_prob", train), ("rollout_prob", rollout))
    ]
    if min(spread) > 0.0:
        yield "probs_pearson_corr", (view.mean("prob_product") - train * rollout) / math.sqrt(spread[0] * spread[1])


def _weights(view: _View, spec: CorrectionSpec) -> dict[str, float]:
    """``rollout_is_…``: weights as the rules leave them (verl ≥ 0.8.0), ``…_raw_…`` before, ``…_applied_…`` as the loss
    has them: 0 where a token is rejected, and divided by their mean where so configured."""
    states = view.states
    lower, upper = spec.weight_bounds
    metrics = _moments(view, "bounded", "rollout_is")
    if spec.weight != "token":
        metrics["rollout_is_max"] = math.exp(min(states.largest("log_weight"), LOG_RATIO_BOUND))
        metrics["rollout_is_min"] = math.exp(max(states.smallest("log_weight"), -LOG_RATIO_BOUND))
    metrics |= _moments(view, "raw", "rollout_is_raw") | _moments(view, "applied", "rollout_is_applied")
    for name, bound, column in (("high", upper, "raw_high"), ("low", lower, "raw_low")):
        if bound is not None:
            metrics[f"rollout_is_ratio_fraction_{name}"] = _fraction(view, spec.weight, column)
    metrics |= _sequence_values(view.row_means("bounded"), "rollout_is", centre=1.0)
    raw_means = view.row_means("raw")
    if upper is not None:
        metrics["rollout_is_seq_fraction_high"] = _mean(raw_means > upper)
    if lower is not None:
        metrics["rollout_is_seq_fraction_low"] = _mean(raw_means < lower)
    if any(rule.action == "zero_weight" for rule in spec.rules):
        metrics["rollout_is_oob_ratio"] = view.mean("zeroed")
    if spec.batch_normalize:
        metrics["rollout_is_batch_norm_factor"] = states.largest("factor")
    return metrics | _quantiles(states)


def _fraction(view: _View, level: Level | None, column: str) -> float:
    """Of tokens, or of sequences, whose tokens share one value."""
    return view.mean(column) if level in ("token", "segment") else _mean(view.rows(column) > 0)


def _moments(view: _View, column: str, prefix: str) -> dict[str, float]:
    """Mean, deviation, extremes and effective sample size of weights over response tokens."""
    mean, square = view.mean(column), view.mean(f"{column}_squared")
    return {
        f"{prefix}_mean": mean,
        f"{prefix}_max": view.states.largest(column),
        f"{prefix}_min": view.states.smallest(column),
        f"{prefix}_std": math.sqrt(max(square - mean * mean, 0.0)) if view.num_tokens > 1 else 0.0,
        f"{prefix}_eff_sample_size": effective_sample_size(view, column),
    }


def effective_sample_size(view: _View, column: str) -> float:
    """(Σw)² / (N·Σw²), a fraction of 0 to 1; 0 where all weights are 0.

    Sums are divided by the largest weight first: nothing overflows or vanishes, and equal weights give exactly 1.
    """
    largest = view.states.largest(column)
    if not largest > 0.0:
        return 0.0
    total, squares = view.states.total(column) / largest, view.states.total(f"{column}_squared") / largest / largest
    return min(total * total / (squares * view.num_tokens), 1.0)


def _quantiles(states: CorrectionStates) -> dict[str, float]:
    """Of raw weights over response tokens, clamped at the bound of log ratios; linear between neighbours."""
    if not len(states.log_weights):
        return {}
    logs = np.clip(states.log_weights.astype(np.float64), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    values = np.quantile(np.exp(logs), [percent / 100 for percent in QUANTILES])
    return {f"rollout_is_p{percent}": float(value) for percent, value in zip(QUANTILES, values, strict=True)}


def _sequence_values(means: FloatArray, prefix: str, *, centre: float) -> dict[str, float]:
    """Over the means of sequences; the deviation is the unbiased one, 0 for a single sequence."""
    return {
        f"{prefix}_seq_mean": _mean(means),
        f"{prefix}_seq_std": _deviation(means),
        f"{prefix}_seq_max": float(means.max()),
        f"{prefix}_seq_min": float(means.min()),
        f"{prefix}_seq_max_deviation": float(np.abs(means - centre).max()),
    }


def _rejections(view: _View, spec: CorrectionSpec) -> dict[str, float]:
    """``rollout_rs_{rule}_…`` of every rule that rejects, but the veto, and of all together."""
    metrics: dict[str, float] = {}
    for index, rule in enumerate(spec.rules):
        if rule.rejects and rule.name != VETO:
            metrics |= _rejection(view, rule, rule_key(index, rule))
    if metrics:
        metrics["rollout_rs_masked_fraction"] = view.mean("rs_rejected")
        metrics["rollout_rs_seq_masked_fraction"] = _mean(view.rows("rs_rejected") > 0)
    return metrics


def _rejection(view: _View, rule: Rule, key: str) -> dict[str, float]:
    """A ratio's values are given as k1 = −log ρ, as verl's options of that name are."""
    states, prefix = view.states, f"rollout_rs_{rule.label}"
    sign = -1.0 if rule.estimator == "ratio" else 1.0
    largest, smallest = states.largest(key), states.smallest(key)
    low_side, high_side = ("high", "low") if sign < 0 else ("low", "high")
    means = sign * view.row_means(key)
    mean_clamped = view.mean(f"{key}:clamped")
    metrics = {
        f"{prefix}_mean": sign * view.mean(key),
        f"{prefix}_max": -smallest if sign < 0 else largest,
        f"{prefix}_min": -largest if sign < 0 else smallest,
        f"{prefix}_std": _std(view.mean(f"{key}:clamped_squared"), mean_clamped, view.num_tokens),
        **_sequence_values(means, prefix, centre=0.0),
        f"{prefix}_masked_fraction": view.mean(f"{key}:rejected"),
        f"{prefix}_seq_masked_fraction": _mean(view.rows(f"{key}:rejected") > 0),
    }
    for side, column, bound in ((low_side, "low", rule.lower), (high_side, "high", rule.upper)):
        if bound is None:
            if side == "low" and rule.estimator in ("k2", "k3"):
                metrics[f"{prefix}_fraction_low"] = 0.0
            continue
        limit = math.log(bound) if rule.estimator == "ratio" else bound
        metrics[f"{prefix}_fraction_{side}"] = _fraction(view, rule.level, f"{key}:{column}")
        is_beyond = means * sign < limit if column == "low" else means * sign > limit
        metrics[f"{prefix}_seq_fraction_{side}"] = _mean(is_beyond)
    return metrics


def _veto(view: _View, spec: CorrectionSpec) -> dict[str, float]:
    """The veto, 0 where there is none."""
    for index, rule in enumerate(spec.rules):
        if rule.name == VETO:
            key = rule_key(index, rule)
            return {
                "rollout_is_veto_fraction": _mean(view.rows(f"{key}:rejected") > 0),
                "rollout_is_catastrophic_token_fraction": view.mean(f"{key}:outside"),
            }
    return {"rollout_is_veto_fraction": 0.0, "rollout_is_catastrophic_token_fraction": 0.0}


def _guide_weights(view: _View, spec: CorrectionSpec) -> dict[str, float]:
    """The guide's ``rollout_is_…``: as above, but deviation and sample size of weights within both thresholds."""
    newest = _weights(view, spec)
    names = ("mean", "max", "min", "std", "eff_sample_size", "ratio_fraction_high", "ratio_fraction_low")
    metrics = {f"rollout_is_{name}": newest[f"rollout_is_{name}"] for name in names if f"rollout_is_{name}" in newest}
    metrics |= {name: value for name, value in newest.items() if name.startswith(("rollout_is_seq_", "rollout_is_p"))}
    if spec.weight_bounds[1] is not None and "rollout_is_oob_ratio" not in newest:
        mean = view.mean("banded")
        metrics["rollout_is_std"] = _std(view.mean("banded_squared"), mean, view.num_tokens)
        metrics["rollout_is_eff_sample_size"] = effective_sample_size(view, "banded")
    if "rollout_is_oob_ratio" in newest:
        metrics["rollout_is_masked_fraction"] = newest["rollout_is_oob_ratio"]
        metrics["rollout_is_seq_masked_fraction"] = _mean(view.rows("zeroed") > 0)
    return metrics


def _guide_rejections(view: _View, spec: CorrectionSpec) -> dict[str, float]:
    """The guide's ``rollout_rs_…``, which are of ratios: of the first rule that rejects by a ratio, but the veto."""
    found = [
        (rule, rule_key(index, rule))
        for index, rule in enumerate(spec.rules)
        if rule.rejects and rule.name != VETO and rule.estimator == "ratio"
    ]
    if not found:
        return {}
    rule, key = found[0]
    column, prefix = f"{key}:ratio", "rollout_rs"
    means = view.row_means(column)
    mean = view.mean(f"{key}:banded")
    metrics = {
        f"{prefix}_mean": view.mean(column),
        f"{prefix}_max": view.states.largest(column),
        f"{prefix}_min": view.states.smallest(column),
        f"{prefix}_std": _std(view.mean(f"{key}:banded_squared"), mean, view.num_tokens),
        f"{prefix}_eff_sample_size": effective_sample_size(view, f"{key}:banded"),
        **_sequence_values(means, prefix, centre=1.0),
        f"{prefix}_masked_fraction": view.mean(f"{key}:rejected"),
        f"{prefix}_seq_masked_fraction": _mean(view.rows(f"{key}:rejected") > 0),
    }
    for side, bound in (("high", rule.upper), ("low", rule.lower)):
        if bound is None:
            continue
        # The guide's revision counted tokens for `geometric`, and sequences for `sequence`.
        level: Level = "token" if rule.level == "geometric" else rule.level
        metrics[f"{prefix}_ratio_fraction_{side}"] = _fraction(view, level, f"{key}:{side}")
        metrics[f"{prefix}_seq_fraction_{side}"] = _mean(means > bound if side == "high" else means < bound)
    return metrics


def _buckets(view: _View, spec: CorrectionSpec) -> Iterator[tuple[str, float]]:
    """By position in the sequence and by policy lag: KL, weights and rejections of each bucket that has tokens."""
    tables: list[tuple[str, tuple[int, ...], FloatArray]] = [("by_position", POSITION_EDGES, view.states.positions)]
    if view.states.lags is not None:
        tables.append(("by_lag", LAG_EDGES, view.states.lags))
    for table_name, edges, table in tables:
        for bucket, name in enumerate(bucket_names(edges)):
            sums = {column: exact_sum(table[:, bucket, index]) for index, column in enumerate(BUCKET_SUMS)}
            tokens = sums["tokens"]
            if not tokens:
                continue
            prefix = f"{table_name}/{name}"
            yield f"{prefix}/tokens", tokens
            yield f"{prefix}/kl", -sums["log_ratio"] / tokens
            yield f"{prefix}/k3_kl", sums["k3"] / tokens
            if spec.weight is not None:
                yield f"{prefix}/rollout_is_mean", sums["weight"] / tokens
            if spec.rejects:
                yield f"{prefix}/masked_fraction", sums["rejected"] / tokens


def _mean(values: np.ndarray) -> float:
    return exact_sum(np.asarray(values, dtype=np.float64)) / len(values) if len(values) else 0.0


def _deviation(values: FloatArray) -> float:
    if len(values) < 2:
        return 0.0
    return math.sqrt(exact_sum(np.square(values - _mean(values))) / (len(values) - 1))


def _std(mean_square: float, mean: float, num_tokens: float) -> float:
    return math.sqrt(max(mean_square - mean * mean, 0.0)) if num_tokens > 1 else 0.0
