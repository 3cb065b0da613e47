"""A recorded step as rollout correction sees it: trajectories one after another, and what is known of their tokens.

Contract: a sequence is a trajectory, of one row or of several, and a segment one of its turns, as in training. What a
batch does not tell, such as turns of which the mask shows fewer, is ``None`` and never guessed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.correction import CorrectionInputs
from mock_scheduler.correction.comparable import valid_column_problems, valid_logprobs
from mock_scheduler.recording.step.step_info import StepInfo


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """One step with M response tokens in S trajectories; train_logprobs: floating ``[M]``, ``None`` where no run gave
    them. Everything else follows from the batch."""

    info: StepInfo
    batch: RolloutBatch
    train_logprobs: torch.Tensor | None

    @cached_property
    def first_rows(self) -> list[int]:
        """The first row of every trajectory, ``[S]``."""
        keys = [identity.trajectory_key for identity in self.batch.identities]
        return [row for row, key in enumerate(keys) if row == 0 or key != keys[row - 1]]

    @cached_property
    def offsets(self) -> torch.Tensor:
        """int64 ``[S + 1]``: where the response tokens of each trajectory start."""
        return self.batch.response_offsets[[*self.first_rows, len(self.batch)]]

    @cached_property
    def places(self) -> torch.Tensor:
        """int64 ``[M]``: which of the batch's tokens each response token is."""
        return self.batch.response_mask.nonzero().flatten()

    @cached_property
    def valid(self) -> torch.Tensor | None:
        """bool ``[M]``, ``None`` where the batch does not say or its column is malformed."""
        return None if valid_column_problems(self.batch) else valid_logprobs(self.batch)

    @cached_property
    def turns(self) -> torch.Tensor | None:
        """int64 ``[M]``: which of the batch's turns each response token is of; ``None`` where that is not told.

        The k-th turn of a row is its k-th unbroken run of response tokens; all of a row's tokens are its only turn.
        """
        batch, mask = self.batch, self.batch.response_mask.numpy()
        starts = mask.copy()
        starts[1:] &= ~mask[:-1]
        first_tokens = batch.row_offsets[:-1].numpy()
        starts[first_tokens] = mask[first_tokens]
        before = np.concatenate(([0], starts.cumsum(dtype=np.int64)))
        first_runs, num_runs = before[first_tokens], np.diff(before[batch.row_offsets.numpy()])
        num_turns = batch.turn_offsets.diff().numpy()
        if not ((num_runs == num_turns) | (num_runs == 0) | (num_turns == 1)).all():
            return None
        row = np.repeat(np.arange(len(batch)), batch.response_lengths.numpy())
        within = np.where(num_turns[row] == 1, 0, before[1:][mask] - 1 - first_runs[row])
        return batch.turn_offsets[:-1][row] + torch.from_numpy(within)

    @cached_property
    def versions_behind(self) -> torch.Tensor | None:
        """int64 ``[M]``: by how many versions the policy that sampled each token was older than that of the step."""
        batch, versions = self.batch, self.batch.policy_versions.long()
        if self.turns is not None:
            by_token = versions[self.turns]
        elif bool((versions == versions[0]).all()) if len(versions) else False:
            by_token = versions[:1].expand(len(batch.rollout_logprobs))
        else:
            return None
        return (self.info.policy_version - by_token).clamp(min=0)

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
        """float64 ``[S]``: the sum of the rewards of a trajectory's rows."""
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
        """float64 ``[S]``: sums of values ``[M]``."""
        lengths = self.offsets.diff()
        index = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return torch.zeros(len(lengths), dtype=torch.float64).index_add(0, index, values.double())

    def inputs(self) -> CorrectionInputs:
        """What correction reads of a step whose training log-probabilities are known."""
        assert self.train_logprobs is not None
        turn_ids = None
        if self.turns is not None:
            firsts = self.batch.turn_offsets[self.first_rows]
            turn_ids = self.turns - torch.repeat_interleave(firsts, self.offsets.diff())
        return CorrectionInputs(
            train_logprobs=self.train_logprobs,
            rollout_logprobs=self.batch.rollout_logprobs,
            response_mask=torch.ones(len(self.batch.rollout_logprobs), dtype=torch.bool),
            cu_seqlens=self.offsets,
            logprob_valid=self.valid,
            turn_ids=turn_ids,
            versions_behind=self.versions_behind,
            advantages=self.advantages,
        )
