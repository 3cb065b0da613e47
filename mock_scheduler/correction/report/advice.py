"""Gives advice on faults of a batch's log-probabilities or weights.

Contract: advice is given exactly where its condition holds, and the condition names the values. Four pieces are the
guide's (verl, ``examples/rollout_correction/README.md``, git e7cdce1c), with its conditions; a remedy of the guide that
does not do what it promises is corrected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mock_scheduler.batch.plausibility import Finding
from mock_scheduler.comparison.thresholds import (
    BIAS_ERRORS,
    HIGHEST_MEAN_WEIGHT,
    LEAST_SAMPLES,
    LOWEST_MEAN_WEIGHT,
    MOST_MASKED,
    MOST_VETOED,
    MOST_WEIGHT_SPREAD,
)
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.correction.report.view import Advice
from mock_scheduler.recording.reading.browse import name_steps
from mock_scheduler.support.text import list_some

_NUM_LISTED = 3
_PREFIXES = ("mismatch/", "rollout_corr/")

Metrics = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Check:
    """One piece of the guide's advice; ``conditions`` yields a text for each condition that holds."""

    title: str
    conditions: Callable[[Metrics], Iterator[str]]
    remedies: tuple[str, ...]


def guide_advice(metrics_by_step: Mapping[int, Metrics], *, watched: str) -> list[Advice]:
    """Gives the guide's advice on a configuration's metrics, step by step, under either prefix.

    watched: the configuration, for the text.
    """
    found = []
    for check in _CHECKS:
        by_step = {step: list(check.conditions(metrics)) for step, metrics in metrics_by_step.items()}
        steps = [step for step, conditions in by_step.items() if conditions]
        if steps:
            first = "; ".join(by_step[steps[0]])
            where = f" at {name_steps(StepRanges.of(steps))}" if len(metrics_by_step) > 1 else ""
            values = f" (values of step {steps[0]})" if len(steps) > 1 else ""
            condition = f"{first}{where}{values}, with {watched}"
            found.append(Advice(severity="warning", title=check.title, condition=condition, remedies=check.remedies))
    return found


def hidden_variance(metrics_by_step: Mapping[int, Metrics], *, watched: str) -> list[Advice]:
    """Gives a note where weights exceed the guide's variance before they are bounded, and not after."""
    hidden = [
        (step, metrics)
        for step, metrics in metrics_by_step.items()
        if list(_varies(metrics, "rollout_is_raw")) and not list(_varies(metrics, "rollout_is"))
    ]
    if not hidden:
        return []
    metrics = hidden[0][1]
    where = f" at {name_steps(StepRanges.of(step for step, _ in hidden))}" if len(metrics_by_step) > 1 else ""
    texts = "; ".join(_varies(metrics, "rollout_is_raw"))
    return [
        Advice(
            severity="note",
            title="Bounds hide the variance of weights",
            condition=f"before they are bounded {texts}{where}, with {watched}",
            remedies=("the bounded weights look healthy since they are bounded: find out where the mismatch is from",),
        )
    ]


def bias_advice(mean_ratio: float, standard_error: float) -> list[Advice]:
    """Warns where the mean ratio is further from 1 than chance explains.

    E[π_train/π_rollout] over tokens sampled from π_rollout is 1, however far the policies are apart. It is 1 given all
    earlier tokens too, so the differences of tokens from 1 are uncorrelated, and their standard error is known.
    """
    if not (math.isfinite(mean_ratio) and standard_error > 0.0):
        return []
    distance = abs(mean_ratio - 1.0) / standard_error
    if distance <= BIAS_ERRORS:
        return []
    remedies = [
        "check that the engine's log-probabilities are those of the distribution it samples from: temperature, top-p, "
        "top-k, masked tokens, penalties and biases"
    ]
    if mean_ratio < 1:
        remedies.append(
            "or nothing is wrong, and tokens that are likelier in training than in the rollout, which carry the mean, "
            "were too rare to be sampled: so it is where the policies are far apart"
        )
    return [
        Advice(
            severity="warning",
            title="The mean ratio is not 1",
            condition=f"it is {mean_ratio:.6g} with a standard error of {standard_error:.2g}, {distance:.1f} of them "
            "from 1. Over tokens sampled from the distribution whose log-probabilities are recorded it is 1, whatever "
            "policy is trained",
            remedies=tuple(remedies),
        )
    ]


def equal_policies(num_equal: int, *, num_tokens: int) -> list[Advice]:
    """Gives a note where both log-probabilities of every token are equal."""
    if not num_tokens or num_equal < num_tokens:
        return []
    condition = "every training log-probability is equal to the recorded one, to the last bit"
    return [Advice(severity="note", title="Nothing to correct", condition=condition)]


def implausible_advice(title: str, found: Sequence[tuple[int, Finding]]) -> Advice:
    """Tells data of one kind that cannot be true, a problem, or seldom are, a warning; with their steps."""
    texts = [f"step {step}: {finding.describe()}" for step, finding in found]
    first = found[0][1]
    return Advice(
        severity="problem" if first.is_impossible else "warning",
        title=title.capitalize(),
        condition=list_some(texts, _NUM_LISTED, "; "),
        remedies=(first.remedy,),
    )


def problem(title: str, conditions: Sequence[str], *remedies: str) -> list[Advice]:
    """Gives a problem where there is any condition."""
    if not conditions:
        return []
    return [Advice(severity="problem", title=title, condition="; ".join(conditions), remedies=remedies)]


def _value(metrics: Metrics, name: str) -> float | None:
    return next((metrics[prefix + name] for prefix in _PREFIXES if prefix + name in metrics), None)


def _varies(metrics: Metrics, prefix: str) -> Iterator[str]:
    std, size = _value(metrics, f"{prefix}_std"), _value(metrics, f"{prefix}_eff_sample_size")
    if std is not None and std > MOST_WEIGHT_SPREAD:
        yield f"{prefix}_std {std:.4g} > {MOST_WEIGHT_SPREAD}"
    if size is not None and size < LEAST_SAMPLES:
        yield f"{prefix}_eff_sample_size {size:.4g} < {LEAST_SAMPLES}"


def _vetoes(metrics: Metrics) -> Iterator[str]:
    value = _value(metrics, "rollout_is_veto_fraction")
    if value is not None and value > MOST_VETOED:
        yield f"rollout_is_veto_fraction {value:.4g} > {MOST_VETOED}"


def _is_off_centre(metrics: Metrics) -> Iterator[str]:
    value = _value(metrics, "rollout_is_mean")
    low, high = LOWEST_MEAN_WEIGHT, HIGHEST_MEAN_WEIGHT
    if value is not None and value < low:
        yield f"rollout_is_mean {value:.4g} < {low}"
    elif value is not None and value > high:
        yield f"rollout_is_mean {value:.4g} > {high}"


def _discards(metrics: Metrics) -> Iterator[str]:
    for name in ("rollout_is_masked_fraction", "rollout_rs_masked_fraction"):
        value = _value(metrics, name)
        if value is not None and value > MOST_MASKED:
            yield f"{name} {value:.4g} > {MOST_MASKED}"


_CHECKS = (
    _Check(
        title="High variance in IS weights",
        conditions=lambda metrics: _varies(metrics, "rollout_is"),
        remedies=(
            "with rollout_is sequence, set rollout_is token, or reject by the geometric mean as well: rollout_rs "
            "geometric (seq_mean_k1). The guide says to switch the level to geometric: there that is an option of "
            "rollout_rs alone, so it rejects sequences and weighs nothing",
            "tighten rollout_is_threshold",
            "check whether rollout and training are too different: the KL by position and by policy lag below",
        ),
    ),
    _Check(
        title="Too many sequences vetoed",
        conditions=_vetoes,
        remedies=(
            "lower rollout_token_veto_threshold, from 1e-4 to 1e-5 say, or set it to null. The guide's 1e-3 vetoes "
            "more: a sequence is rejected for a token whose ratio is below the threshold",
            "look at the worst tokens below for numerical faults in either log-probability",
            "verify that rollout and training are not of quite different policies",
        ),
    ),
    _Check(
        title="Mean IS weight far from 1",
        conditions=_is_off_centre,
        remedies=(
            "check that the engine returns log-probabilities (verl: calculate_log_probs true) and none is a filler",
            "verify that rollout log-probabilities are those of the very tokens that are trained on",
            "look for a systematic bias: temperature, logprobs mode, top-p and top-k of rollout and training",
        ),
    ),
    _Check(
        title="Too much data discarded",
        conditions=_discards,
        remedies=(
            "widen the thresholds",
            "truncate in the place of masking: rollout_is_threshold as one number, rollout_is_mode truncate",
            "with rollout_rs token or sequence, try geometric (seq_mean_k1), with bounds as wide as the batch needs: "
            "it is an option of rejection, and the guide's own bounds, 1.0002 to 1.001, are so tight that they reject "
            "more than any other",
        ),
    ),
)
