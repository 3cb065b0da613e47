"""Rollout correction of a step's batch; the host corrects the whole batch, so that no layout changes a bit of it.

A sequence is a trajectory here, of one row or of several (``rollout_form: step``), and a segment one of its turns.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.plausibility import valid_logprobs
from mock_scheduler.correction import (
    CorrectionResult,
    CorrectionSpec,
    CorrectionStates,
    compute_correction,
    correction_metrics,
)
from mock_scheduler.correction.batch_tokens import BatchTokens
from mock_scheduler.correction.comparable import comparison_problems, logprob_problems
from mock_scheduler.errors import CorrectionError
from mock_scheduler.support.text import bullet_list
from pipelines.config.schema import PipelineConfig

#: Counts that no release of verl has; a run with ``verl_compat`` logs them beside that release's metrics.
_OWN_COUNTS = tuple(
    f"rollout_corr/{name}"
    for name in ("num_tokens", "num_sequences", "kept_fraction", "all_rejected", "rollout_nan_fraction")
)


def correction_spec(config: PipelineConfig) -> CorrectionSpec | None:
    """The computation that ``algorithm.rollout_correction`` asks for; ``None`` where it is off."""
    section = config.algorithm.rollout_correction
    return None if section is None else section.spec


def check_correctable(batch: RolloutBatch, config: PipelineConfig) -> None:
    """Raises ``CorrectionError`` where log-probabilities are missing, or of another distribution than training's."""
    problems = comparison_problems(
        batch.sampling,
        temperature=config.actor_infer.generating_args.temperature,
        restricts_vocabulary=config.actor_infer.only_action_tokens,
    )
    problems += logprob_problems(batch)
    if problems:
        raise CorrectionError(
            f"rollout correction cannot compare these rollouts with the policy under training:{bullet_list(problems)}"
        )


def with_known_logprobs(batch: RolloutBatch, logprobs: torch.Tensor, tokens: slice | None = None) -> RolloutBatch:
    """Replaces log-probabilities missing from the engine, so no filler enters a ratio or the loss.

    logprobs: floating, of the policy under training, one per response token, or per token of ``tokens``.
    """
    valid = valid_logprobs(batch)
    if valid is None or bool(valid.all()):
        return batch
    tokens = tokens or slice(0, len(valid))
    recorded = batch.rollout_logprobs.clone()
    recorded[tokens] = torch.where(torch.from_numpy(valid[tokens]), recorded[tokens], logprobs.to(recorded.dtype))
    return replace(batch, rollout_logprobs=recorded)


class BatchCorrector:
    """Corrects the trajectories of one batch, all at once or some after others."""

    def __init__(self, batch: RolloutBatch, spec: CorrectionSpec, *, policy_version: int) -> None:
        """``policy_version``: the version of the policy under training."""
        self._spec = spec
        self._tokens = BatchTokens(batch=batch, policy_version=policy_version)

    @property
    def batch(self) -> RolloutBatch:
        """Returns the recorded batch."""
        return self._tokens.batch

    def token_range(self, first: int, last: int) -> slice:
        """Returns the response tokens of trajectories ``first`` to ``last`` - 1."""
        return self._tokens.token_range(first, last)

    def correct(
        self,
        train_logprobs: torch.Tensor,
        *,
        trajectories: tuple[int, int] | None = None,
        advantages: torch.Tensor | None = None,
        rules_with_advantages: bool = True,
    ) -> CorrectionResult:
        """Corrects trajectories, as ``compute_correction`` does.

        Args:
            train_logprobs: Floating, one per response token of the trajectories.
            trajectories: ``[first, last)``; all where ``None``.
            advantages: Floating, of all response tokens of the batch, for rules about their sign.
            rules_with_advantages: False leaves out the rules about advantages.
        """
        spec = self._spec
        if not rules_with_advantages:
            spec = replace(spec, rules=tuple(rule for rule in spec.rules if rule.when == "always"))
        inputs = self._tokens.inputs(train_logprobs, spec, trajectories=trajectories, advantages=advantages)
        return compute_correction(inputs, spec)


def corrected_step_metrics(results: list[CorrectionResult], spec: CorrectionSpec) -> dict[str, float]:
    """Computes the metrics of all results together; with ``verl_compat`` means of the release's own, as verl does."""
    merged = correction_metrics(CorrectionStates.merge([result.states for result in results]), spec)
    released = [result.release_metrics for result in results if result.release_metrics is not None]
    if not released:
        return merged
    means = {name: sum(metrics.get(name, 0.0) for metrics in released) / len(released) for name in released[0]}
    return {name: merged[name] for name in _OWN_COUNTS} | means
