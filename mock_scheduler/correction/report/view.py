"""The health of rollout correction over recorded steps: everything that the text, the page and the JSON show.

Contract: plain data; every number was computed from the recording and from a run's training log-probabilities, and what
was not is ``None``. ``measured`` is ``None`` where no step has training log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

from mock_scheduler.correction.report.advice import Advice
from mock_scheduler.correction.report.presets import Outcome
from mock_scheduler.recording.inspection.histogram import Bar

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSide:
    """What is known of the training that the rollouts are compared with; ``source``: where that is from.

    temperature, restricts_vocabulary: ``None`` where no configuration says. correction: ``rollout_correction`` in
    words, ``None`` where it is off or not known.
    """

    source: str
    temperature: float | None
    restricts_vocabulary: bool | None
    correction: str | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepHealth:
    """One step. invalid, zeros, positive: response tokens whose rollout log-probability is not valid as the column
    says, exactly 0.0, above 0. zero_rows: rows of nothing but 0.0 that chance does not explain.

    policy_versions, lag: smallest and largest. From kl on: ``None`` without training log-probabilities.
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
    zero_rows: int
    kl: float | None = None
    k3_kl: float | None = None
    chi2_token: float | None = None
    effective_sample_size: float | None = None
    smallest_log_ratio: float | None = None
    largest_log_ratio: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Response tokens by position in the trajectory, or by policy lag: means over them."""

    name: str
    tokens: int
    kl: float
    k3_kl: float
    mean_ratio: float
    effective_sample_size: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstToken:
    """position: which response token of its trajectory; row_position: which token of its row; both from 0.

    text: by the recording's vocabulary, ``None`` without one.
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
    """A trajectory; length: response tokens whose ratio is known."""

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
    """Of all steps with training log-probabilities together.

    policies: KL, chi² and perplexities by the names of metrics. quantiles: of the log ratios of tokens, by percent.
    token_ess, sequence_ess: (Σw)² / (N·Σw²) of unbounded ratios of tokens, and of whole sequences. num_unknown: tokens
    without a finite, valid log-probability on either side, which are in no other number. token_bars, sequence_bars: of
    log ratios, and of their sums over sequences; middle_bars: of log ratios of the 1st to the 99th percentile, empty
    where these reach nearly as far as all. lags: ``None`` where they are not known. watched: the configuration that
    advice is about.
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
    """recording, run: where from; run is ``None`` where none was given. sampling: every way in which steps were
    sampled. next_command: how to make what is missing; empty where nothing is."""

    recording: str
    run: str | None
    training: TrainingSide
    sampling: tuple[str, ...]
    steps: tuple[StepHealth, ...]
    measured: Measured | None
    advice: tuple[Advice, ...]
    next_command: str = ""
