"""Judges at every step whether an engine beside the trainer samples by the trainer's policy.

Of the tokens that the policy version says are the trainer's own, both sides' log-probabilities must agree to the
engine's noise. A step whose tokens do not is told in the log, with the cause that fits; training goes on, and rollout
correction can weigh the difference.

Contract: the same on every rank; it changes no bit of training. Replayed rollouts are not judged here, since a replay
with settings of its own has another policy at the same version; ``inspect`` judges them.
"""

from __future__ import annotations

import logging

import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.comparison.thresholds import ENGINE_FLOAT32
from mock_scheduler.correction.report.mismatch import MismatchJudge
from mock_scheduler.correction.report.scored_step import ScoredStep
from mock_scheduler.correction.report.view import TrainingSide
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID
from pipelines.config.schema import PipelineConfig

logger = logging.getLogger("pipelines.mismatch")


class EngineMismatch:
    """Takes the scored batch of one step after another."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        engine = config.actor_infer
        side = TrainingSide(
            source="the run",
            temperature=engine.generating_args.temperature,
            restricts_vocabulary=engine.only_action_tokens,
            correction=None,
            precision=config.precision,
            rollout_precision=config.engine_dtype,
        )
        self._judge = MismatchJudge(side, wide_bound=ENGINE_FLOAT32)

    @classmethod
    def build(cls, config: PipelineConfig) -> EngineMismatch | None:
        """Builds the judge of a run with an engine beside the trainer; ``None`` for all others."""
        return cls(config) if config.samples and config.actor_infer.engine != "megatron" else None

    def is_due(self, step: int) -> bool:
        """Says whether a step's rollouts are this run's own."""
        mock = self._config.rollout_mock
        return mock.mode_of(step=step, kind="train", scheduler_id=DEFAULT_SCHEDULER_ID) != "mock"

    def judge(self, batch: RolloutBatch, train_logprobs: torch.Tensor, *, step: int) -> dict[str, float]:
        """Judges a step and returns its metrics; train_logprobs: floating ``[M]``, before the step's first update."""
        info = StepInfo(step=step, mode="train", scheduler_id=DEFAULT_SCHEDULER_ID, run_id="run", policy_version=step)
        scored = ScoredStep(info=info, batch=batch, train_logprobs=train_logprobs)
        self._judge.add(scored)
        found = self._judge.advice_of(step)
        if found is not None:
            logger.warning("[mismatch] %s: %s. What to do: %s", found.title, found.condition, "; ".join(found.remedies))
        lags = scored.versions_behind
        sizes = scored.log_ratio().abs()
        own = sizes[~sizes.isnan() if lags is None else ~sizes.isnan() & (lags == 0)]
        if not len(own):
            return {"mismatch/engine_tokens": 0.0}
        return {
            "mismatch/engine_tokens": float(len(own)),
            "mismatch/engine_mean": float(own.mean()),
            "mismatch/engine_max": float(own.max()),
            "mismatch/engine_disagrees": float(found is not None),
        }
