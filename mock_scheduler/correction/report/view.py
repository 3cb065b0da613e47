"""Holds the report of rollout correction as data: everything that the text, the page and the JSON show.

Contract: every number was computed from the recording and from a run's training log-probabilities; a number that could
not be computed is ``None``. ``measured`` is ``None`` where no step has training log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mock_scheduler.recording.inspection.histogram import Bar

FORMAT_VERSION = 1

Severity = Literal["problem", "warning", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Holds a finding, and remedies for it, the likeliest first.

    severity: ``problem`` where numbers mean nothing or training would refuse, ``warning`` where the guide warns, else
    ``note``. condition: the values that were found.
    """

    severity: Severity
    title: str
    condition: str
    remedies: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedWeights:
    """Holds weights over response tokens.

    raw_mean: before any bound. The others are of the loss's weights: 0 where a token is rejected, and divided by their
    mean where so configured. effective_sample_size: (Σw)² / (N·Σw²).
    """

    raw_mean: float
    mean: float
    std: float
    largest: float
    effective_sample_size: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Holds the effect of one configuration on all response tokens.

    group: outcomes of one number share their ``computation``, and differ in mode and loss alone. description: the
    whole configuration. weights: ``None`` without importance weights. kept_fraction: of response tokens.
    rejected_sequences: the fraction of sequences that lose all of their response tokens. note: the source of
    advantages, or the reason why numbers are missing.
    """

    name: str
    group: int
    computation: str
    description: str
    source: str
    is_bypass: bool
    weights: AppliedWeights | None = None
    kept_fraction: float | None = None
    rejected_sequences: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSide:
    """The training with which the rollouts are compared; ``source``: the configuration that says so.

    temperature, restricts_vocabulary: ``None`` where no configuration says. correction: ``rollout_correction`` in
    words, ``None`` where it is off or not known. precision, rollout_precision: of training and of the recorded run,
    the coarser of its own and that of the engine's weights; ``None`` where no configuration says.
    """

    source: str
    temperature: float | None
    restricts_vocabulary: bool | None
    correction: str | None
    precision: str | None = None
    rollout_precision: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepHealth:
    """Holds the health of one step.

    invalid, zeros, positive: response tokens whose rollout log-probability is not valid by the column, exactly 0.0, or
    above 0. made_up_rows: rows of one value alone that chance does not explain. policy_versions, lag: smallest and
    largest; a negative lag is of a policy newer than the step's. mixed_trajectories: of several versions. From kl on:
    ``None`` without training log-probabilities.
    """

    step: int
    trajectories: int
    rows: int
    response_tokens: int
    policy_version: int
    policy_versions: tuple[int, int] | None
    lag: tuple[int, int] | None
    has_valid_column: bool
    invalid: int
    zeros: int
    positive: int
    made_up_rows: int
    mixed_trajectories: int
    kl: float | None = None
    k3_kl: float | None = None
    chi2_token: float | None = None
    effective_sample_size: float | None = None
    smallest_log_ratio: float | None = None
    largest_log_ratio: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Means over the response tokens of one range of positions in the trajectory, or of policy lags."""

    name: str
    tokens: int
    kl: float
    k3_kl: float
    mean_ratio: float
    effective_sample_size: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstToken:
    """A token; position: its number among the response tokens of its trajectory; row_position: its number in its row.

    Both numbers are from 0. text: by the recording's vocabulary, ``None`` without one.
    """

    step: int
    identity: str
    position: int
    row_position: int
    token_id: int
    text: str | None
    rollout_logprob: float
    train_logprob: float
    log_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstSequence:
    """Holds a trajectory; length: the number of response tokens with a known ratio."""

    step: int
    identity: str
    tag: str
    length: int
    reward: float
    log_ratio_sum: float
    log_ratio_mean: float
    worst_token: WorstToken


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Numbers of all steps with training log-probabilities together.

    policies: KL, chi² and perplexities by the names of metrics. quantiles: of the log ratios of tokens, by percent.
    token_ess, sequence_ess: (Σw)² / (N·Σw²) of unbounded ratios of tokens, and of whole sequences. num_unknown: tokens
    without a finite, valid log-probability on either side; no other number has them. token_bars, sequence_bars: of
    log ratios, and of their sums over sequences; middle_bars: of log ratios of the 1st to the 99th percentile, empty
    where these reach nearly as far as all. lags: ``None`` where they are not known. watched: the configuration of
    which advice speaks.
    """

    steps: tuple[int, ...]
    num_tokens: int
    num_sequences: int
    num_unknown: int
    num_equal: int
    policies: dict[str, float]
    mean_ratio: float
    std_ratio: float
    token_ess: float
    sequence_ess: float
    quantiles: dict[str, float]
    token_bars: tuple[Bar, ...]
    middle_bars: tuple[Bar, ...]
    sequence_bars: tuple[Bar, ...]
    positions: tuple[Bucket, ...]
    lags: tuple[Bucket, ...] | None
    worst_sequences: tuple[WorstSequence, ...]
    worst_tokens: tuple[WorstToken, ...]
    outcomes: tuple[Outcome, ...]
    watched: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionReport:
    """Holds the whole report.

    recording, run: the folders; run is ``None`` where none was given. sampling: every way in which steps were sampled.
    next_command: makes the training log-probabilities that are missing; empty where none are.
    """

    recording: str
    run: str | None
    training: TrainingSide
    sampling: tuple[str, ...]
    steps: tuple[StepHealth, ...]
    measured: Measured | None
    advice: tuple[Advice, ...]
    next_command: str = ""
