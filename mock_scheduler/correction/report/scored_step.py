"""A recorded step as rollout correction sees it: its trajectories, the facts of their tokens, and the worst of them.

Contract: trajectories and turns are those of ``BatchTokens``, as in training.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import torch

from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.batch.plausibility import ROUNDING, VALID_COLUMN, made_up_rows
from mock_scheduler.batch.versions import count_mixed
from mock_scheduler.correction.batch_tokens import BatchTokens
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.engine.inputs import CorrectionInputs
from mock_scheduler.correction.report.view import StepHealth, WorstSequence, WorstToken
from mock_scheduler.recording.inspection.vocabulary import Vocabulary
from mock_scheduler.recording.step.step_info import StepInfo


@dataclass(frozen=True, kw_only=True)
class ScoredStep:
    """Holds one step with M response tokens in S trajectories.

    train_logprobs: floating ``[M]``, ``None`` where no run gave them. Everything else follows from the batch.
    """

    info: StepInfo
    batch: RolloutBatch
    train_logprobs: torch.Tensor | None

    @cached_property
    def tokens(self) -> BatchTokens:
        """Returns the batch's trajectories, turns and policy lag."""
        return BatchTokens(batch=self.batch, policy_version=self.info.policy_version)

    @property
    def first_rows(self) -> list[int]:
        """Returns the first row of every trajectory, ``[S]``."""
        return self.tokens.first_rows

    @property
    def offsets(self) -> torch.Tensor:
        """Returns the starts of each trajectory's response tokens, int64 ``[S + 1]``."""
        return self.tokens.offsets

    @property
    def versions_behind(self) -> torch.Tensor | None:
        """The versions by which each token's policy was older than the step's, int64 ``[M]``; ``None`` if not told."""
        return self.tokens.versions_behind

    @cached_property
    def places(self) -> torch.Tensor:
        """Returns the index of each response token among the batch's tokens, int64 ``[M]``."""
        return self.batch.response_mask.nonzero().flatten()

    @property
    def valid(self) -> torch.Tensor | None:
        """Bool ``[M]``, False without a log-probability; ``None`` without a sound column that says so."""
        return self.tokens.valid

    @cached_property
    def advantages(self) -> torch.Tensor | None:
        """float64 ``[M]``: the trajectory's reward less its group's mean; ``None`` where a group has one alone."""
        batch, rewards = self.batch, self.rewards
        members: dict[object, list[int]] = defaultdict(list)
        for number, row in enumerate(self.first_rows):
            members[batch.identities[row].group_key].append(number)
        if any(len(numbers) < 2 for numbers in members.values()):
            return None
        advantages = rewards.clone()
        for numbers in members.values():
            advantages[numbers] -= rewards[numbers].mean()
        return torch.repeat_interleave(advantages, self.offsets.diff())

    @cached_property
    def rewards(self) -> torch.Tensor:
        """Returns float64 ``[S]``: the sum of the rewards of a trajectory's rows."""
        bounds = [*self.first_rows, len(self.batch)]
        sizes = torch.tensor(bounds, dtype=torch.int64).diff()
        index = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        return torch.zeros(len(sizes), dtype=torch.float64).index_add(0, index, self.batch.rewards.double())

    def log_ratio(self) -> torch.Tensor:
        """float64 ``[M]``: training less rollout, NaN where either is not finite or not valid."""
        assert self.train_logprobs is not None
        difference = self.train_logprobs.double() - self.batch.rollout_logprobs.double()
        is_known = difference.isfinite() if self.valid is None else difference.isfinite() & self.valid
        return torch.where(is_known, difference, torch.nan)

    def sum_by_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Returns float64 ``[S]``: sums of values ``[M]``."""
        lengths = self.offsets.diff()
        index = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return torch.zeros(len(lengths), dtype=torch.float64).index_add(0, index, values.double())

    def inputs(self, spec: CorrectionSpec) -> CorrectionInputs:
        """Makes the inputs of correction for a step whose training log-probabilities are known."""
        assert self.train_logprobs is not None
        return self.tokens.inputs(self.train_logprobs, spec, advantages=self.advantages)


def recorded_health(step: ScoredStep) -> StepHealth:
    """Finds the health of a step without training log-probabilities."""
    batch, logprobs = step.batch, step.batch.rollout_logprobs
    versions, lags = batch.policy_versions, step.versions_behind
    return StepHealth(
        step=step.info.step,
        trajectories=batch.num_trajectories,
        rows=len(batch),
        response_tokens=len(logprobs),
        policy_version=step.info.policy_version,
        policy_versions=(int(versions.min()), int(versions.max())) if len(versions) else None,
        lag=None if lags is None or not len(lags) else (int(lags.min()), int(lags.max())),
        has_valid_column=VALID_COLUMN in batch.extras,
        invalid=0 if step.valid is None else int((~step.valid).sum()),
        zeros=int((logprobs == 0).sum()),
        positive=int((logprobs > ROUNDING if step.valid is None else (logprobs > ROUNDING) & step.valid).sum()),
        made_up_rows=len(made_up_rows(batch)),
        mixed_trajectories=count_mixed(batch),
    )


def describe_sampling(sampling: SamplingParams) -> str:
    """Says ``temperature 1, top_p 1, top_k 0, log-probabilities processed``."""
    return (
        f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}, "
        f"log-probabilities {sampling.logprobs_mode}"
    )


@dataclass(kw_only=True, slots=True)
class WorstFinder:
    """Keeps the worst of all steps: tokens by |log ratio|, trajectories by |sum of log ratios|; ``num`` of each.

    Among equals, earlier steps and places come first.
    """

    num: int
    vocabulary: Vocabulary | None
    tokens: list[WorstToken] = field(default_factory=list)
    sequences: list[WorstSequence] = field(default_factory=list)

    def add(self, step: ScoredStep, log_ratio: torch.Tensor, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Looks through a step.

        Args:
            step: The step.
            log_ratio: float64 ``[M]``, NaN where it is not known.
            sums: The sums of known log ratios, ``[S]``.
            counts: Their numbers, ``[S]``.
        """
        if not self.num:
            return
        sizes = torch.where(log_ratio.isnan(), -1.0, log_ratio.abs())
        worst = [index for index in _largest(sizes, self.num) if sizes[index] >= 0]
        self.tokens = sorted(
            [*self.tokens, *(self._token(step, index, log_ratio) for index in worst)],
            key=lambda token: -abs(token.log_ratio),
        )[: self.num]
        totals = torch.where(counts > 0, sums.abs(), -1.0)
        chosen = [number for number in _largest(totals, self.num) if counts[number] > 0]
        found = [self._sequence(step, number, log_ratio, sizes, int(counts[number])) for number in chosen]
        self.sequences = sorted([*self.sequences, *found], key=lambda item: -abs(item.log_ratio_sum))[: self.num]

    def _token(self, step: ScoredStep, index: int, log_ratio: torch.Tensor) -> WorstToken:
        batch = step.batch
        row = int(torch.searchsorted(batch.response_offsets, index, right=True)) - 1
        trajectory = int(torch.searchsorted(step.offsets, index, right=True)) - 1
        place = int(step.places[index])
        token_id = int(batch.tokens[place])
        assert step.train_logprobs is not None
        return WorstToken(
            step=step.info.step,
            identity=str(batch.identities[row]),
            position=index - int(step.offsets[trajectory]),
            row_position=place - int(batch.row_offsets[row]),
            token_id=token_id,
            text=None if self.vocabulary is None else self.vocabulary.decode([token_id]),
            rollout_logprob=float(batch.rollout_logprobs[index]),
            train_logprob=float(step.train_logprobs[index]),
            log_ratio=float(log_ratio[index]),
        )

    def _sequence(
        self, step: ScoredStep, number: int, log_ratio: torch.Tensor, sizes: torch.Tensor, length: int
    ) -> WorstSequence:
        start, stop = int(step.offsets[number]), int(step.offsets[number + 1])
        row = step.first_rows[number]
        total = float(log_ratio[start:stop].nansum())
        return WorstSequence(
            step=step.info.step,
            identity=step.batch.identities[row].trajectory_name,
            tag=step.batch.tags[row],
            length=length,
            reward=float(step.rewards[number]),
            log_ratio_sum=total,
            log_ratio_mean=total / length,
            worst_token=self._token(step, start + int(sizes[start:stop].argmax()), log_ratio),
        )


def _largest(values: torch.Tensor, num: int) -> list[int]:
    """Places of the largest values, the first of equal ones first."""
    order = torch.sort(values, descending=True, stable=True).indices
    return [int(index) for index in order[:num]]
