"""Makes the metrics of rollout correction out of merged states.

Contract: pure; every value is a float. Names are verl's newest under ``rollout_corr/`` and the guide's under
``mismatch/``, with the right values: sequences without response tokens are in no mean, and fractions beyond a threshold
are of raw weights, not of weights already cut at it. A metric without a value, as the mean of nothing, is left out.
docs/rollout_correction.md has every formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from mock_scheduler.correction.config.rules import LOG_RATIO_BOUND, CorrectionSpec
from mock_scheduler.correction.engine.inputs import CorrectionResult
from mock_scheduler.correction.engine.rejection_metrics import guide_rejections, rejections, veto
from mock_scheduler.correction.engine.states import (
    BUCKET_SUMS,
    LAG_EDGES,
    POSITION_EDGES,
    CorrectionStates,
    FloatArray,
    View,
    bucket_names,
    effective_sample_size,
    exact_sum,
    fraction_beyond,
    mean_of,
    moments,
    sequence_values,
    std_of,
)

NEWEST = "rollout_corr/"
GUIDE = "mismatch/"
QUANTILES = (25, 50, 75, 95, 99)


def correction_metrics(states: CorrectionStates, spec: CorrectionSpec) -> dict[str, float]:
    """Computes every metric of these states; the counts alone where no token has a known ratio.

    Log-probabilities far apart give infinities, and no warning.
    """
    with np.errstate(all="ignore"):
        return _correction_metrics(states, spec)


def result_metrics(result: CorrectionResult, spec: CorrectionSpec) -> Mapping[str, float]:
    """Returns the metrics that a run logs of one batch: with ``verl_compat`` the release's own, else ours."""
    return correction_metrics(result.states, spec) if result.release_metrics is None else result.release_metrics


def _correction_metrics(states: CorrectionStates, spec: CorrectionSpec) -> dict[str, float]:
    view = View(states=states, filled=states.sums["tokens"] > 0)
    counts = _counts(view)
    if view.num_tokens == 0:
        return {f"{NEWEST}{name}": value for name, value in counts.items()}
    policies = dict(_policies(view))
    newest = {**counts, **policies, **dict(_buckets(view, spec))}
    guide = {f"mismatch_{name}": value for name, value in policies.items() if name in _GUIDE_POLICY_NAMES}
    if spec.weight is not None:
        weights = _weights(view, spec)
        newest |= weights
        guide |= _guide_weights(view, spec, weights)
    newest |= rejections(view, spec)
    guide |= guide_rejections(view, spec)
    for prefix_names in (newest, guide):
        prefix_names |= veto(view, spec)
    return {f"{NEWEST}{name}": value for name, value in newest.items()} | {
        f"{GUIDE}{name}": value for name, value in guide.items()
    }


_GUIDE_POLICY_NAMES = frozenset(
    (
        *("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "kl", "k3_kl"),
        *("log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio"),
    )
)


def _counts(view: View) -> dict[str, float]:
    unknown, kept = view.states.total("unknown"), view.states.total("kept")
    not_finite = unknown + view.states.total("assumed")
    every = view.num_tokens + unknown
    return {
        "num_tokens": every,
        "num_sequences": float(view.filled.sum()),
        "kept_fraction": kept / every if every else 0.0,
        "all_rejected": float(every > 0 and kept == 0),
        "rollout_nan_fraction": not_finite / every if every else 0.0,
    }


def _policies(view: View) -> Iterator[tuple[str, float]]:
    """Yields distances of the two policies: verl's 13 names, and differences of probabilities."""
    train, rollout = view.row_means("train"), view.row_means("rollout")
    difference = rollout - train
    yield "training_ppl", mean_of(np.exp(-train))
    yield "training_log_ppl", mean_of(-train)
    yield "rollout_ppl", mean_of(np.exp(-rollout))
    yield "rollout_log_ppl", mean_of(-rollout)
    yield "kl", 0.0 - view.mean("log_ratio")
    # Of ℓ without a clamp, which would hide the tokens that are furthest off.
    yield "k3_kl", view.mean("k3")
    yield "log_ppl_diff", mean_of(difference)
    yield "log_ppl_abs_diff", mean_of(np.abs(difference))
    yield "log_ppl_diff_max", float(difference.max())
    yield "log_ppl_diff_min", float(difference.min())
    yield "ppl_ratio", mean_of(np.exp(difference))
    yield "chi2_token", view.mean("ratio_squared") - 1.0
    # E[ρ²] − 1 is chi²(train‖rollout) under rollout; the exponent is clamped before it is doubled, as in verl.
    clamped = view.rows("log_ratio").clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    yield "chi2_seq", mean_of(np.exp(2.0 * clamped)) - 1.0
    yield from _probabilities(view)
    kept = view.states.total("kept")
    rejected = view.num_tokens - kept
    if rejected:
        kept_k3 = view.states.total("kept_k3")
        yield "rejected_k3_kl", (view.states.total("k3") - kept_k3) / rejected
        if kept:
            yield "kept_k3_kl", kept_k3 / kept


def _probabilities(view: View) -> Iterator[tuple[str, float]]:
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


def _weights(view: View, spec: CorrectionSpec) -> dict[str, float]:
    """``rollout_is_…``: weights after the rules (verl ≥ 0.8.0), ``…_raw_…`` before them, ``…_applied_…`` in the loss.

    In the loss the weights of rejected tokens are 0, and weights are divided by their mean where so configured.
    """
    states = view.states
    lower, upper = spec.weight_bounds
    metrics = moments(view, "bounded", "rollout_is")
    if spec.weight != "token":
        extremes = {"max": states.largest("log_weight"), "min": states.smallest("log_weight")}
        for name, value in extremes.items():
            metrics[f"rollout_is_{name}"] = math.exp(min(max(value, -LOG_RATIO_BOUND), LOG_RATIO_BOUND))
    metrics |= moments(view, "raw", "rollout_is_raw") | moments(view, "applied", "rollout_is_applied")
    for name, bound, column in (("high", upper, "raw_high"), ("low", lower, "raw_low")):
        if bound is not None:
            metrics[f"rollout_is_ratio_fraction_{name}"] = fraction_beyond(view, spec.weight, column)
    metrics |= sequence_values(view.row_means("bounded"), "rollout_is", centre=1.0)
    raw_means = view.row_means("raw")
    if upper is not None:
        metrics["rollout_is_seq_fraction_high"] = mean_of(raw_means > upper)
    if lower is not None:
        metrics["rollout_is_seq_fraction_low"] = mean_of(raw_means < lower)
    if any(rule.action == "zero_weight" for rule in spec.rules):
        metrics["rollout_is_oob_ratio"] = view.mean("zeroed")
    if spec.batch_normalize and "factor" in states.maxima:  # states of a verl release have none
        metrics["rollout_is_batch_norm_factor"] = states.largest("factor")
    return metrics | _quantiles(states)


def _quantiles(states: CorrectionStates) -> dict[str, float]:
    """Quantiles of raw weights over response tokens, clamped at the bound of log ratios; linear between neighbours."""
    if not len(states.log_weights):
        return {}
    ranks = np.array([percent / 100 for percent in QUANTILES]) * (len(states.log_weights) - 1)
    # A weight rises with its logarithm, so only the neighbours of a quantile need an exponential.
    logs = np.sort(states.log_weights)
    below, above = (
        np.exp(np.clip(logs[places.astype(np.int64)].astype(np.float64), -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
        for places in (np.floor(ranks), np.ceil(ranks))
    )
    share = ranks - np.floor(ranks)
    step = above - below
    values = np.where(share < 0.5, below + step * share, above - step * (1.0 - share))
    return {f"rollout_is_p{percent}": float(value) for percent, value in zip(QUANTILES, values, strict=True)}


def _guide_weights(view: View, spec: CorrectionSpec, newest: Mapping[str, float]) -> dict[str, float]:
    """The guide's ``rollout_is_…``: deviation and sample size are of weights clamped to both thresholds."""
    names = ("mean", "max", "min", "std", "eff_sample_size", "ratio_fraction_high", "ratio_fraction_low")
    metrics = {f"rollout_is_{name}": newest[f"rollout_is_{name}"] for name in names if f"rollout_is_{name}" in newest}
    metrics |= {name: value for name, value in newest.items() if name.startswith(("rollout_is_seq_", "rollout_is_p"))}
    if spec.weight_bounds[1] is not None and "rollout_is_oob_ratio" not in newest:
        mean = view.mean("banded")
        metrics["rollout_is_std"] = std_of(view.mean("banded_squared"), mean, view.num_tokens)
        metrics["rollout_is_eff_sample_size"] = effective_sample_size(view, "banded")
    if "rollout_is_oob_ratio" in newest:
        metrics["rollout_is_masked_fraction"] = newest["rollout_is_oob_ratio"]
        metrics["rollout_is_seq_masked_fraction"] = mean_of(view.rows("zeroed") > 0)
    return metrics


def _buckets(view: View, spec: CorrectionSpec) -> Iterator[tuple[str, float]]:
    """KL, weights and rejections of each bucket that has tokens, by position in the sequence and by policy lag."""
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
            yield f"{prefix}/kl", 0.0 - sums["log_ratio"] / tokens
            yield f"{prefix}/k3_kl", sums["k3"] / tokens
            if spec.weight is not None:
                yield f"{prefix}/rollout_is_mean", sums["weight"] / tokens
            if spec.rejects:
                yield f"{prefix}/masked_fraction", sums["rejected"] / tokens
