"""Numbers and lines of the report of rollout correction, as its text and its page both have them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mock_scheduler.correction.report.view import CorrectionReport, Measured, Outcome, StepHealth, TrainingSide
from mock_scheduler.support.text import count_of, format_range

_LABELS = {
    "kl": "KL(rollout || training), mean of -log ratio",
    "k3_kl": "KL, estimator k3",
    "chi2_token": "chi² of tokens",
    "chi2_seq": "chi² of sequences",
    "training_ppl": "perplexity, training",
    "rollout_ppl": "perplexity, rollout",
    "ppl_ratio": "ratio of perplexities, training to rollout",
    "training_log_ppl": "log perplexity, training",
    "rollout_log_ppl": "log perplexity, rollout",
    "log_ppl_diff": "log perplexity difference, training less rollout",
    "log_ppl_abs_diff": "its absolute value, mean",
    "log_ppl_diff_max": "its largest",
    "log_ppl_diff_min": "its smallest",
    "probs_diff_mean": "|difference of probabilities|, mean",
    "probs_diff_max": "|difference of probabilities|, largest",
    "probs_diff_std": "|difference of probabilities|, deviation",
    "probs_pearson_corr": "correlation of probabilities",
}


def number(value: float | None, *, digits: int = 4) -> str:
    """Formats a number with up to so many significant digits; ``-`` for none, and words for NaN and infinities."""
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if math.isfinite(value) else str(value)


def percent(value: float | None) -> str:
    """``97.3 %``; never 100 % or 0 % unless it is all or nothing."""
    if value is None:
        return "-"
    text = f"{100 * value:.1f}"
    if (text == "100.0") != (value == 1.0):
        text = f"{100 * value:.4g}" if value < 0.99999 else "> 99.999"
    elif text == "0.0" and value > 0.0:
        text = f"{100 * value:.1g}"
    return f"{text} %"


def policy_rows(measured: Measured) -> Iterator[tuple[str, str]]:
    """Yields labels and numbers of the distance between the policies."""
    yield (
        "response tokens",
        f"{measured.num_tokens:,} in {count_of(measured.num_sequences, 'trajectory', 'trajectories')}",
    )
    if measured.num_unknown:
        yield "left out", f"{count_of(measured.num_unknown, 'token')} without a known ratio"
    equal = f" ({percent(measured.num_equal / measured.num_tokens)})" if measured.num_tokens else ""
    yield "equal to the last bit", f"{measured.num_equal:,}{equal}"
    yield "effective sample size, tokens", number(measured.token_ess)
    yield "effective sample size, whole sequences", number(measured.sequence_ess)
    yield "ratio of tokens", f"mean {number(measured.mean_ratio, digits=6)}, deviation {number(measured.std_ratio)}"
    for name, value in measured.policies.items():
        yield _LABELS.get(name, name), number(value)


def recording_rows(report: CorrectionReport) -> Iterator[tuple[str, str]]:
    """Labels and facts that the recording alone tells."""
    steps = report.steps
    tokens = sum(step.response_tokens for step in steps)
    yield "recording", report.recording
    yield "run", report.run or "none given: training log-probabilities are not known"
    yield "steps", f"{len(steps)}: {steps[0].step} to {steps[-1].step}" if len(steps) > 1 else str(steps[0].step)
    yield "response tokens", f"{tokens:,} in {count_of(sum(step.rows for step in steps), 'row')}"
    yield "sampled with", "; ".join(report.sampling)
    yield "training", _describe_training(report.training)
    yield "correction", report.training.correction or "none configured"
    for note in report.training.notes:
        yield "", note
    lags = [lag for step in steps if step.lag is not None for lag in step.lag]
    mixed = sum(step.mixed_trajectories for step in steps)
    unknown = sum(step.lag is None and step.response_tokens > 0 for step in steps)
    yield (
        "policy lag",
        (format_range(min(lags), max(lags)) if lags else "-")
        + (f"; not told at {count_of(unknown, 'step')}" if unknown else "")
        + (f"; of several versions {count_of(mixed, 'trajectory', 'trajectories')}" if mixed else ""),
    )
    yield "log-probabilities", _describe_logprobs(report)


def _describe_training(training: TrainingSide) -> str:
    if training.temperature is None or training.restricts_vocabulary is None:
        return f"not known: {training.source} says neither temperature nor vocabulary"
    over = "the allowed tokens" if training.restricts_vocabulary else "the vocabulary"
    return f"log softmax(logits / {training.temperature:g}) over {over}, as {training.source} says"


def _describe_logprobs(report: CorrectionReport) -> str:
    steps = report.steps
    zeros, positive, rows = (
        sum(values) for values in zip(*((s.zeros, s.positive, s.made_up_rows) for s in steps), strict=True)
    )
    parts = [f"{zeros:,} exactly 0.0", f"{positive:,} above 0", f"{count_of(rows, 'row')} of fillers"]
    with_column = sum(step.has_valid_column for step in steps)
    if with_column:
        invalid = sum(step.invalid for step in steps)
        parts.append(f"{invalid:,} not valid, by the column of {count_of(with_column, 'step')}")
    else:
        parts.append("no column says which are valid")
    return ", ".join(parts)


def lag_text(step: StepHealth) -> str:
    """``0``, ``0..2``; ``-`` where it is not known."""
    return "-" if step.lag is None else format_range(*step.lag)


def outcome_cells(outcome: Outcome) -> list[str]:
    """Formats weights (raw mean; applied mean, deviation, largest, sample size), kept tokens, rejected sequences."""
    weights = outcome.weights
    return [
        number(None if weights is None else weights.raw_mean),
        number(None if weights is None else weights.mean),
        number(None if weights is None else weights.std),
        number(None if weights is None else weights.largest),
        number(None if weights is None else weights.effective_sample_size),
        percent(outcome.kept_fraction),
        percent(outcome.rejected_sequences),
    ]


def group_outcomes(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Groups outcomes with the same computation, in the order of the first of each."""
    groups: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.group, []).append(outcome)
    return list(groups.values())


def others_text(group: Sequence[Outcome]) -> str:
    """Returns ``also slime_tis, aipo (bypass)``; empty for a group of one."""
    names = [name_outcome(outcome) for outcome in group[1:]]
    return f"also {', '.join(names)}" if names else ""


def name_outcome(outcome: Outcome) -> str:
    """Returns ``aipo (bypass)``."""
    return f"{outcome.name}{' (bypass)' if outcome.is_bypass else ''}"


def headline(report: CorrectionReport) -> tuple[str, str]:
    """Returns a word and a sentence that judge these steps."""
    severities = [advice.severity for advice in report.advice]
    problems, warnings = severities.count("problem"), severities.count("warning")
    measured = report.measured
    if problems or warnings:
        counts = [count_of(problems, "problem")] if problems else []
        counts += [count_of(warnings, "warning")] if warnings else []
        word = " and ".join(counts)
    else:
        word = "nothing amiss" if measured is not None else "not measured"
    if measured is None:
        return word, "No training log-probabilities are known, so this is what the recording alone says."
    return word, (
        f"KL {number(measured.policies.get('k3_kl'))} (k3) between rollout and training policy, effective sample size "
        f"{number(measured.token_ess)} by tokens and {number(measured.sequence_ess)} by whole sequences, log ratios "
        f"from {number(measured.quantiles.get('p0'))} to {number(measured.quantiles.get('p100'))}."
    )
