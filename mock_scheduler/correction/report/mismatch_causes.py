"""Predicts how rollout and training log-probabilities of one policy version differ, for each possible cause.

Contract: pure functions of a step's response tokens. A cause that predicts each recorded value says what it leaves of
the mean |log ratio|; one that is only told by its kind says nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mock_scheduler.comparison.thresholds import (
    AGREEMENT_FLOAT32,
    BIAS_ERRORS,
    EXPLAINED_SHARE,
    FEWEST_AGREEING,
    FEWEST_FITTED,
    FEWEST_LIKELIEST,
    FITTED_SHARE,
    LEAST_SLOPE,
    MOST_CUT,
)
from mock_scheduler.correction.report.scored_step import ScoredStep
from mock_scheduler.support.text import count_of

Floats: TypeAlias = "npt.NDArray[np.float64]"
Flags: TypeAlias = "npt.NDArray[np.bool_]"
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredTokens:
    """Holds the response tokens of a step with both log-probabilities. ``is_own``: of lag 0. ``row``: of each.

    ``context``: a hash of the row's tokens up to and with this one; equal tokens after equal histories have one.
    """

    step: int
    version: int
    rollout: Floats
    train: Floats
    is_own: Flags
    row: npt.NDArray[np.int64]
    context: npt.NDArray[np.uint64]

    @property
    def difference(self) -> Floats:
        """Returns training less rollout."""
        return self.train - self.rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """An explanation: in words, what it leaves of the mean |log ratio|, and what to do."""

    text: str
    remedy: str
    left: float | None = None


def read_tokens(step: ScoredStep) -> ScoredTokens | None:
    """Reads the tokens whose log-probabilities are known on both sides; ``None`` where lag is not told."""
    lags = step.versions_behind
    if lags is None or step.train_logprobs is None:
        return None
    batch = step.batch
    is_known = ~step.log_ratio().isnan().numpy()
    row = np.repeat(np.arange(len(batch)), batch.response_lengths.numpy())
    contexts = _hash_contexts(batch.tokens.numpy(), batch.row_offsets.numpy())
    return ScoredTokens(
        step=step.info.step,
        version=step.info.policy_version,
        rollout=batch.rollout_logprobs.double().numpy()[is_known],
        train=step.train_logprobs.double().numpy()[is_known],
        is_own=(lags == 0).numpy()[is_known],
        row=row[is_known],
        context=contexts[step.places.numpy()][is_known],
    )


def _hash_contexts(tokens: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Returns a hash of each row's tokens up to and with each of them: sums of mixed (place, token), modulo 2^64."""
    places = np.arange(len(tokens)) - np.repeat(offsets[:-1], np.diff(offsets))
    mixed = tokens.astype(np.uint64) * np.uint64(2_654_435_761) + places.astype(np.uint64) + np.uint64(1)
    mixed *= _MULTIPLIER
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MULTIPLIER
    mixed ^= mixed >> np.uint64(32)
    sums = np.concatenate(([np.uint64(0)], mixed.cumsum(dtype=np.uint64)))
    within: npt.NDArray[np.uint64] = sums[1:] - np.repeat(sums[offsets[:-1]], np.diff(offsets))
    return within


def find_causes(
    tokens: ScoredTokens, chosen: Flags, others: Iterable[ScoredTokens], *, temperature: float | None, is_wide: bool
) -> Iterator[Cause | None]:
    """Yields a cause, or ``None``, for each kind, the surest first.

    Args:
        tokens: Of the step.
        chosen: The tokens to explain.
        others: Steps nearby, whose training log-probabilities are known.
        temperature: Of training; ``None`` where not known.
        is_wide: Whether both sides are of float32 or wider.
    """
    rollout, train = tokens.rollout[chosen], tokens.train[chosen]
    if len(rollout) < FEWEST_AGREEING:
        return
    yield _made_up_cause(rollout)
    yield _mask_cause(rollout, train)
    shifted = [cause for shift in (1, -1) if (cause := _shift_cause(tokens, chosen, shift)) is not None]
    yield min(shifted, key=lambda cause: cause.left or 0.0, default=None)
    for other in others:
        yield other_step_cause(tokens, chosen, other)
    usual = AGREEMENT_FLOAT32 if is_wide else float(np.median(np.abs(train - rollout)))
    yield _likeliest_cause(rollout, train, noise=max(usual, AGREEMENT_FLOAT32))
    yield _cut_cause(rollout, train, noise=AGREEMENT_FLOAT32)
    yield _temperature_cause(rollout, train, temperature)
    yield _other_weights_cause(rollout, train, version=tokens.version)


def _explains(predicted: Floats, rollout: Floats, train: Floats) -> float | None:
    """What a prediction of the recorded values leaves, where that is little enough; ``None`` otherwise."""
    if len(rollout) < FEWEST_AGREEING:
        return None
    left, before = float(np.abs(rollout - predicted).mean()), float(np.abs(rollout - train).mean())
    return left if before > AGREEMENT_FLOAT32 and left <= EXPLAINED_SHARE * before else None


def _shift_cause(tokens: ScoredTokens, chosen: Flags, shift: int) -> Cause | None:
    """``shift`` 1: the recorded value of a token is that of the next one."""
    here, there = (slice(None, -1), slice(1, None)) if shift == 1 else (slice(1, None), slice(None, -1))
    is_pair = (tokens.row[here] == tokens.row[there]) & chosen[here]
    rollout, train, other = (
        values[is_pair] for values in (tokens.rollout[here], tokens.train[here], tokens.train[there])
    )
    left = _explains(other, rollout, train)
    if left is None:
        return None
    which, where = ("next", "left") if shift == 1 else ("previous", "right")
    return Cause(
        text=f"each recorded log-probability is that of the {which} token: they lie one place to the {where}",
        remedy="move them by one place where they are recorded: a model's output at a place is of the token after it",
        left=left,
    )


def other_step_cause(tokens: ScoredTokens, chosen: Flags, other: ScoredTokens) -> Cause | None:
    """Compares with training's values of another step for the same tokens after the same histories."""
    order = np.argsort(other.context)
    known, values = other.context[order], other.train[order]
    own = tokens.context[chosen]
    places = np.searchsorted(known, own).clip(max=max(len(known) - 1, 0))
    is_shared = known[places] == own if len(known) else np.zeros(len(own), dtype=np.bool_)
    left = _explains(values[places[is_shared]], tokens.rollout[chosen][is_shared], tokens.train[chosen][is_shared])
    if left is None:
        return None
    return Cause(
        text=(
            f"the recorded log-probabilities are those of the weights of step {other.step} (version {other.version}), "
            f"by {count_of(int(is_shared.sum()), 'token')} with the same history in both steps, and not of version "
            f"{tokens.version}"
        ),
        remedy="stamp rows with the version of the weights that sampled them, or give the engine the weights in time",
        left=left,
    )


def _likeliest_cause(rollout: Floats, train: Floats, *, noise: float) -> Cause | None:
    """The likeliest token's value is never below the sampled one's, and both together are no more than 1."""
    is_equal = np.abs(train - rollout) <= noise
    others = ~is_equal
    if is_equal.mean() < FEWEST_LIKELIEST or others.sum() < FEWEST_AGREEING / 2:
        return None
    is_possible = (train[others] < rollout[others]) & (np.exp(train[others]) + np.exp(rollout[others]) <= 1 + noise)
    # A cut distribution is above training's as well, but by little.
    if not is_possible.all() or (rollout - train)[others].max() <= MOST_CUT:
        return None
    return Cause(
        text=(
            "the recorded log-probabilities are those of the likeliest token, and not of the sampled one: "
            f"{is_equal.mean():.0%} of the tokens agree, all others are above training's, with both probabilities "
            "together at most 1"
        ),
        remedy="record the log-probability of the token that was sampled; engines list the likeliest ones beside it",
    )


def _made_up_cause(rollout: Floats) -> Cause | None:
    values, counts = np.unique(rollout, return_counts=True)
    place = int(counts.argmax())
    if counts[place] * 2 <= len(rollout):
        return None
    return Cause(
        text=f"{counts[place] / len(rollout):.0%} of the recorded log-probabilities are {values[place]:.9g}: made up",
        remedy="have the engine return the log-probabilities of sampled tokens",
    )


def _mask_cause(rollout: Floats, train: Floats) -> Cause | None:
    """A token that was never sampled has no value, and 0 is filled in for it."""
    is_empty, is_apart = rollout == 0, np.abs(train - rollout) > AGREEMENT_FLOAT32
    if (is_apart & is_empty).sum() < FEWEST_AGREEING / 2 or (is_apart & ~is_empty).any() or is_empty.all():
        return None
    return Cause(
        text=(
            f"{count_of(int((is_apart & is_empty).sum()), 'response token')} have a recorded log-probability of "
            "exactly 0, and all others agree: the response mask has tokens that nobody sampled, as of a template or an "
            "answer"
        ),
        remedy="mark sampled tokens alone in the response mask",
        left=float(np.where(is_empty, 0.0, np.abs(train - rollout)).mean()),
    )


def _cut_cause(rollout: Floats, train: Floats, *, noise: float) -> Cause | None:
    gaps = rollout - train
    if gaps.min() < -noise or gaps.max() > MOST_CUT or (gaps > noise).sum() < FEWEST_AGREEING / 2:
        return None
    return Cause(
        text=(
            "every recorded log-probability is at least training's, by up to "
            f"{gaps.max():.3g}: those of a distribution cut to its likeliest tokens (top-p, top-k), which keeps "
            f"{math.exp(-gaps.max()):.0%} or more"
        ),
        remedy="sample with top_p 1 and top_k 0, or record raw log-probabilities",
    )


def _temperature_cause(rollout: Floats, train: Floats, temperature: float | None) -> Cause | None:
    """Another temperature multiplies logits, so log-probabilities lie about a line of another slope."""
    if len(rollout) < FEWEST_FITTED or np.ptp(train) == 0:
        return None
    slope, offset = np.polyfit(train, rollout, 1)
    left, before = float(np.abs(rollout - slope * train - offset).mean()), float(np.abs(rollout - train).mean())
    if slope <= 0 or abs(slope - 1) < LEAST_SLOPE or left > FITTED_SHARE * before:
        return None
    known = ""
    if temperature is not None:
        is_raw = temperature != 1 and round(temperature / slope, 1) == 1
        known = f", about {temperature / slope:.2g} where training computes at {temperature:g}"
        known += ", as raw log-probabilities are" if is_raw else ""
    return Cause(
        text=(
            f"the recorded log-probabilities are those of another temperature{known} (or of weights that are as much "
            f"{'sharper' if slope > 1 else 'flatter'})"
        ),
        remedy="set actor_infer.generating_args.temperature to the engine's, and record processed log-probabilities",
        left=left,
    )


def _other_weights_cause(rollout: Floats, train: Floats, *, version: int) -> Cause | None:
    """Values that fit their own tokens, whose mean ratio is 1, are of other weights."""
    with np.errstate(all="ignore"):
        ratios = np.exp(train - rollout)
    error = float(ratios.std() / math.sqrt(len(ratios)))
    if not math.isfinite(error) or abs(float(ratios.mean()) - 1) > BIAS_ERRORS * error:
        return None
    return Cause(
        text=(
            f"the recorded log-probabilities fit the sampled tokens (mean ratio {ratios.mean():.4g}), and not the "
            f"weights of version {version}: another step's weights sampled them, or those of another timeline, as "
            "after a resume with other settings"
        ),
        remedy=(
            "stamp rows with the version of the weights that sampled them; record rows of another timeline anew, into "
            "another dump_dir. A replay under settings of its own is such a timeline from its second step on"
        ),
    )
