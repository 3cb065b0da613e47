"""Builds the report of rollout correction from one recorded step after another.

Contract: of a step's tokens only log ratios (float32) and the worst few stay in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mock_scheduler.batch import SamplingParams
from mock_scheduler.batch.plausibility import (
    ROUNDING,
    VALID_COLUMN,
    Finding,
    FindingKind,
    find_impossible,
    find_unlikely,
)
from mock_scheduler.correction.comparable import (
    comparison_problems,
    logprob_problems,
)
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.engine.metrics import correction_metrics, result_metrics
from mock_scheduler.correction.engine.states import LAG_EDGES, POSITION_EDGES, CorrectionStates, FloatArray
from mock_scheduler.correction.report.advice import (
    Metrics,
    bias_advice,
    equal_policies,
    guide_advice,
    hidden_variance,
    implausible_advice,
    problem,
)
from mock_scheduler.correction.report.distributions import (
    count_bars,
    count_middle_bars,
    sequence_sample_size,
    sum_buckets,
)
from mock_scheduler.correction.report.mismatch import MismatchJudge
from mock_scheduler.correction.report.presets import (
    BASIC,
    CONFIGURED,
    Candidate,
    PresetTable,
    correct_step,
    missing_for,
    preset_candidate,
)
from mock_scheduler.correction.report.scored_step import (
    ScoredStep,
    WorstFinder,
    describe_sampling,
    recorded_health,
)
from mock_scheduler.correction.report.view import (
    Advice,
    CorrectionReport,
    Measured,
    StepHealth,
    TrainingSide,
)
from mock_scheduler.errors import CorrectionError
from mock_scheduler.recording.inspection.vocabulary import Vocabulary
from mock_scheduler.support.text import count_of, list_some

#: Weights of every token's ratio, without rules: a measurement of the two policies themselves.
_MEASURE = CorrectionSpec(weight="token")
_PREFIX = "rollout_corr/"
_POLICIES = (
    *("kl", "k3_kl", "chi2_token", "chi2_seq"),
    *("training_ppl", "rollout_ppl", "ppl_ratio", "training_log_ppl", "rollout_log_ppl"),
    *("log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min"),
    *("probs_diff_mean", "probs_diff_max", "probs_diff_std", "probs_pearson_corr"),
)
_QUANTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
_NUM_LISTED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """Holds choices of the reader, and facts from outside of steps.

    recording, run: for the report's head. configured: the correction that a configuration asks for, shown first.
    presets: further configurations. num_worst: tokens and trajectories to name. vocabulary: texts of tokens.
    """

    recording: str
    run: str | None
    training: TrainingSide
    configured: CorrectionSpec | None
    presets: Sequence[Candidate]
    num_worst: int
    vocabulary: Vocabulary | None


class ReportBuilder:
    """Takes steps by ``add`` and builds the report of all."""

    def __init__(self, options: ReportOptions) -> None:
        self._options = options
        configured = options.configured
        own = [] if configured is None else [Candidate(name=CONFIGURED, spec=configured)]
        self._watched = own[0] if own else preset_candidate(BASIC)
        self._table = PresetTable([*own, *options.presets])
        self._worst = WorstFinder(num=options.num_worst, vocabulary=options.vocabulary)
        self._steps: list[StepHealth] = []
        self._sampling: list[SamplingParams] = []
        self._problems: list[str] = []
        self._refused: list[str] = []
        self._states: CorrectionStates | None = None
        self._log_ratios: list[npt.NDArray[np.float32]] = []
        self._sequence_sums: list[FloatArray] = []
        self._metrics: dict[int, Metrics] = {}
        self._not_finite = self._train_positive = 0
        self._mismatch = MismatchJudge(options.training)
        self._implausible: dict[FindingKind, list[tuple[int, Finding]]] = {}

    def add(self, step: ScoredStep) -> None:
        """Adds one more step."""
        batch = step.batch
        if batch.sampling not in self._sampling:
            self._sampling.append(batch.sampling)
        self._problems += [f"step {step.info.step}: {text}" for text in logprob_problems(batch)]
        for finding in (*find_impossible(batch, latest_version=step.info.policy_version), *find_unlikely(batch)):
            if finding.kind not in (FindingKind.POSITIVE_LOGPROB, FindingKind.MADE_UP):  # in advice of their own
                self._implausible.setdefault(finding.kind, []).append((step.info.step, finding))
        health = recorded_health(step)
        if step.train_logprobs is not None:
            health = self._measure(step, health)
        self._steps.append(health)

    def build(self, *, next_command: str = "") -> CorrectionReport:
        """Builds the report of all steps; ``next_command`` makes the training log-probabilities that are missing."""
        measured = self._measured()
        return CorrectionReport(
            recording=self._options.recording,
            run=self._options.run,
            training=self._options.training,
            sampling=tuple(map(describe_sampling, self._sampling)),
            steps=tuple(self._steps),
            measured=measured,
            advice=tuple(self._advice(measured)),
            next_command=next_command,
        )

    def _measure(self, step: ScoredStep, health: StepHealth) -> StepHealth:
        log_ratio = step.log_ratio()
        is_known = ~log_ratio.isnan()
        sums, counts = step.sum_by_sequence(log_ratio.nan_to_num(0.0)), step.sum_by_sequence(is_known)
        assert step.train_logprobs is not None
        self._not_finite += int((~step.train_logprobs.isfinite()).sum())
        self._train_positive += int((step.train_logprobs > ROUNDING).sum())
        self._worst.add(step, log_ratio, sums, counts)
        self._log_ratios.append(log_ratio[is_known].float().numpy())
        self._sequence_sums.append(sums[counts > 0].numpy())
        self._mismatch.add(step)
        self._table.add(step)
        self._watch(step)
        result = correct_step(step, _MEASURE)
        self._merge(result.states)
        metrics = correction_metrics(result.states, _MEASURE)
        if not bool(is_known.any()):
            return health
        return replace(
            health,
            kl=metrics[f"{_PREFIX}kl"],
            k3_kl=metrics[f"{_PREFIX}k3_kl"],
            chi2_token=metrics[f"{_PREFIX}chi2_token"],
            effective_sample_size=metrics[f"{_PREFIX}rollout_is_raw_eff_sample_size"],
            smallest_log_ratio=result.states.smallest("log_ratio"),
            largest_log_ratio=result.states.largest("log_ratio"),
        )

    def _merge(self, states: CorrectionStates) -> None:
        """Merges states step by step, so that no more than one merged set is kept."""
        own = replace(states, log_weights=np.empty(0, dtype=np.float32))
        self._states = own if self._states is None else CorrectionStates.merge([self._states, own])

    def _watch(self, step: ScoredStep) -> None:
        """Measures the watched configuration, for advice."""
        spec = self._watched.spec
        missing = missing_for(spec, step)
        if missing:
            self._refused.append(f"step {step.info.step}: the configured correction {missing}")
            return
        try:
            result = correct_step(step, spec)
        except CorrectionError as error:
            self._refused.append(f"step {step.info.step}: {error}")
            return
        self._metrics[step.info.step] = result_metrics(result, spec)
        limit, num_rejected = spec.max_rejected_fraction, int((~result.kept).sum())
        if limit is not None and num_rejected > limit * len(result.kept):
            self._refused.append(
                f"step {step.info.step}: {num_rejected / len(result.kept):.1%} of response tokens would be rejected, "
                f"above max_rejected_fraction {limit:g}"
            )

    def _measured(self) -> Measured | None:
        states = self._states
        if states is None:
            return None
        values, sums = np.concatenate(self._log_ratios), np.concatenate(self._sequence_sums)
        metrics = correction_metrics(states, _MEASURE)
        quantiles = np.quantile(values, [percent / 100 for percent in _QUANTILES]).tolist() if len(values) else []
        return Measured(
            steps=tuple(step.step for step in self._steps if step.kl is not None),
            num_tokens=len(values),
            num_sequences=len(sums),
            num_unknown=int(states.total("unknown")),
            num_equal=int((values == 0).sum()),
            policies={name: metrics[_PREFIX + name] for name in _POLICIES if _PREFIX + name in metrics},
            mean_ratio=metrics.get(f"{_PREFIX}rollout_is_raw_mean", math.nan),
            std_ratio=metrics.get(f"{_PREFIX}rollout_is_raw_std", math.nan),
            token_ess=metrics.get(f"{_PREFIX}rollout_is_raw_eff_sample_size", math.nan),
            sequence_ess=sequence_sample_size(sums),
            quantiles={f"p{percent}": value for percent, value in zip(_QUANTILES, quantiles, strict=False)},
            token_bars=count_bars(values),
            middle_bars=count_middle_bars(values),
            sequence_bars=count_bars(sums),
            positions=tuple(sum_buckets(states.positions, POSITION_EDGES)),
            lags=None if states.lags is None else tuple(sum_buckets(states.lags, LAG_EDGES)),
            worst_sequences=tuple(self._worst.sequences),
            worst_tokens=tuple(self._worst.tokens),
            outcomes=tuple(self._table.outcomes()),
            watched=self._watched_name(),
        )

    def _watched_name(self) -> str:
        if self._watched.name == CONFIGURED:
            return "the configured rollout_correction"
        return f"the guide's basic configuration ({BASIC}), since none is configured"

    def _advice(self, measured: Measured | None) -> list[Advice]:
        found = self._comparability()
        found += problem("Missing log-probabilities", self._problems)
        found += [implausible_advice(kind.value, findings) for kind, findings in self._implausible.items()]
        found += self._mismatch.advice()
        sides = (("rollout", sum(step.positive for step in self._steps)), ("training", self._train_positive))
        found += problem(
            "Log-probabilities above 0",
            [f"{count_of(number, 'token')} of {side}" for side, number in sides if number],
            "no probability is above 1: they are of something else, or were changed",
        )
        found += problem(
            "Training log-probabilities that are not finite",
            [count_of(self._not_finite, "response token")] if self._not_finite else [],
            "look for the first NaN with trace.kinds=all and mock-scheduler compare; a token that the policy cannot "
            "choose has -inf",
        )
        found += problem("Training would stop", self._refused[:_NUM_LISTED])
        if measured is not None:
            found += guide_advice(self._metrics, watched=self._watched_name())
            found += hidden_variance(self._metrics, watched=self._watched_name())
            error = measured.std_ratio / math.sqrt(measured.num_tokens) if measured.num_tokens else 0.0
            if not self._mismatch.has_named:  # its cause would be named a second time, as a guess
                found += bias_advice(measured.mean_ratio, error)
            found += equal_policies(measured.num_equal, num_tokens=measured.num_tokens)
        found += self._unused_tokens()
        return found

    def _comparability(self) -> list[Advice]:
        """Compares sampling with training; of unknown training, only problems of any training are found."""
        training = self._options.training
        texts = [
            text
            for sampling in self._sampling
            for text in comparison_problems(
                sampling,
                temperature=sampling.temperature if training.temperature is None else training.temperature,
                restricts_vocabulary=bool(training.restricts_vocabulary),
            )
        ]
        return problem("Log-probabilities of another distribution", list(dict.fromkeys(texts)))

    def _unused_tokens(self) -> list[Advice]:
        invalid = sum(step.invalid for step in self._steps)
        if not invalid:
            return []
        steps = [str(step.step) for step in self._steps if step.invalid]
        return [
            Advice(
                severity="note",
                title="Tokens without a rollout log-probability",
                condition=f"{count_of(invalid, 'response token')} at step {list_some(steps, 5, ', ')}, as the column "
                f"{VALID_COLUMN} says",
                remedies=("rollout_correction.nan_policy decides what becomes of them: reject, ratio_one or error",),
            )
        ]
