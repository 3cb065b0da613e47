"""Rollout correction of a step's batch, on the host and on the whole batch, so that no layout changes a bit of it.

A sequence is a trajectory here, of one row or of several (``rollout_form: step``), and a segment one of its turns.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.schema import PipelineConfig
from mock_scheduler.correction import (
    CorrectionInputs,
    CorrectionResult,
    CorrectionSpec,
    CorrectionStates,
    compute_correction,
    correction_metrics,
)
from mock_scheduler.correction.comparable import comparison_problems, logprob_problems, valid_logprobs
from mock_scheduler.errors import CorrectionError
from mock_scheduler.text import bullet_list
from pipelines.algorithm.trajectories import TrajectoryTable, build_trajectory_table, find_turn_ends


def correction_spec(config: PipelineConfig) -> CorrectionSpec | None:
    """What ``algorithm.rollout_correction`` asks for; ``None`` where it is off."""
    section = config.algorithm.rollout_correction
    return None if section is None else section.spec


def check_correctable(batch: RolloutBatch, config: PipelineConfig) -> None:
    """Raise ``CorrectionError`` where log-probabilities are missing, or not of what training computes."""
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
    """The batch with ``logprobs`` where the engine gave none, so that its fillers are in no ratio and in no loss.

    logprobs: floating, of the policy under training, one per response token, or per token of ``tokens``.
    """
    valid = valid_logprobs(batch)
    if valid is None or bool(valid.all()):
        return batch
    tokens = tokens or slice(0, len(valid))
    recorded = batch.rollout_logprobs.clone()
    recorded[tokens] = torch.where(valid[tokens], recorded[tokens], logprobs.to(recorded.dtype))
    return replace(batch, rollout_logprobs=recorded)


class BatchCorrector:
    """Corrects the trajectories of one batch, all at once or some after others."""

    def __init__(self, batch: RolloutBatch, spec: CorrectionSpec, *, policy_version: int) -> None:
        """``policy_version``: that of the policy under training."""
        self._spec = spec
        self._batch = batch
        self._table = build_trajectory_table(batch)
        self._turns = _turns_of_tokens(batch, self._table, is_needed=_needs_turns(spec))
        self._lags = _versions_behind(batch, policy_version)
        self._valid = valid_logprobs(batch)

    @property
    def batch(self) -> RolloutBatch:
        """What is corrected, as recorded."""
        return self._batch

    def token_range(self, first: int, last: int) -> slice:
        """The response tokens of trajectories ``first`` to ``last`` - 1."""
        offsets = self._table.token_offsets
        return slice(int(offsets[first]), int(offsets[last]))

    def correct(
        self,
        train_logprobs: torch.Tensor,
        *,
        trajectories: tuple[int, int] | None = None,
        advantages: torch.Tensor | None = None,
        rules_with_advantages: bool = True,
    ) -> CorrectionResult:
        """The correction of trajectories ``[first, last)``, of all where none are given.

        train_logprobs: floating, one per response token of theirs. advantages: of all response tokens of the batch,
        for rules that ask for their sign; ``rules_with_advantages`` False leaves such rules out.
        Raises ``CorrectionError`` as ``compute_correction`` does.
        """
        first, last = trajectories or (0, len(self._table.rewards))
        tokens = self.token_range(first, last)
        spec = self._spec
        if not rules_with_advantages:
            spec = replace(spec, rules=tuple(rule for rule in spec.rules if rule.when == "always"))
        offsets = self._table.token_offsets[first : last + 1]

        def part(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[tokens]

        inputs = CorrectionInputs(
            train_logprobs=train_logprobs,
            rollout_logprobs=self._batch.rollout_logprobs[tokens],
            response_mask=torch.ones(tokens.stop - tokens.start, dtype=torch.bool),
            cu_seqlens=offsets - offsets[0],
            logprob_valid=part(self._valid),
            turn_ids=part(self._turns),
            versions_behind=part(self._lags),
            advantages=part(advantages),
        )
        return compute_correction(inputs, spec)


def corrected_step_metrics(results: list[CorrectionResult], spec: CorrectionSpec) -> dict[str, float]:
    """Metrics of all of these together; with ``verl_compat`` the release's own, as means, as it makes them."""
    released = [result.release_metrics for result in results if result.release_metrics is not None]
    if released:
        return {
            name: sum(metrics[name] for metrics in released if name in metrics) / len(released) for name in released[0]
        }
    return correction_metrics(CorrectionStates.merge([result.states for result in results]), spec)


def _needs_turns(spec: CorrectionSpec) -> bool:
    return spec.weight == "segment" or any(rule.level == "segment" for rule in spec.rules)


def _turns_of_tokens(batch: RolloutBatch, table: TrajectoryTable, *, is_needed: bool) -> torch.Tensor | None:
    """int64 ``[M]``: the turn of every response token within its trajectory."""
    if not is_needed:
        return None
    ends = find_turn_ends(batch)
    turns = np.searchsorted(ends.numpy(), np.arange(len(batch.rollout_logprobs)), side="right")
    first_turns = np.repeat(table.turn_offsets[:-1].numpy(), table.token_offsets.diff().numpy())
    return torch.from_numpy(turns - first_turns)


def _versions_behind(batch: RolloutBatch, policy_version: int) -> torch.Tensor | None:
    """int64 ``[M]``: by how much each token's version is older; ``None`` where turns cannot be told apart."""
    versions, turns = batch.policy_versions.long(), batch.turn_offsets.diff()
    first = versions[batch.turn_offsets[:-1].clamp(max=max(len(versions) - 1, 0))] if len(versions) else versions
    is_one = bool((versions == torch.repeat_interleave(first, turns)).all())
    if is_one and bool((turns > 0).all()):
        by_token = torch.repeat_interleave(first, batch.response_lengths)
    else:
        try:
            ends = find_turn_ends(batch)
        except ValueError:
            return None
        by_token = versions[np.searchsorted(ends.numpy(), np.arange(len(batch.rollout_logprobs)), side="right")]
    return (policy_version - by_token).clamp(min=0)
