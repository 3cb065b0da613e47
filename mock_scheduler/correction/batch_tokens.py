"""A rollout batch as correction sees it: trajectories one after another, and facts of their tokens.

Contract: a sequence is a trajectory, of one row or of several, and a segment one of its turns. A fact that the batch
does not tell is ``None`` and never guessed, as turns where the mask shows fewer of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.correction.comparable import valid_column_problems, valid_logprobs
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.engine.inputs import CorrectionInputs
from mock_scheduler.errors import CorrectionError
from mock_scheduler.support.text import count_of, list_some

_NUM_LISTED = 8


@dataclass(frozen=True, kw_only=True)
class BatchTokens:
    """A batch with M response tokens in S trajectories; policy_version: the version of the policy under training."""

    batch: RolloutBatch
    policy_version: int

    @cached_property
    def first_rows(self) -> list[int]:
        """The first row of every trajectory, ``[S]``."""
        keys = [identity.trajectory_key for identity in self.batch.identities]
        return [row for row, key in enumerate(keys) if row == 0 or key != keys[row - 1]]

    @cached_property
    def offsets(self) -> torch.Tensor:
        """The starts of each trajectory's response tokens, int64 ``[S + 1]``."""
        return self.batch.response_offsets[[*self.first_rows, len(self.batch)]]

    @cached_property
    def valid(self) -> torch.Tensor | None:
        """Bool ``[M]``, False where the engine gave no log-probability; ``None`` without a sound column."""
        return None if valid_column_problems(self.batch) else valid_logprobs(self.batch)

    @cached_property
    def turns(self) -> torch.Tensor | None:
        """The turn of each response token among the batch's turns, int64 ``[M]``; ``None`` where not told.

        The k-th turn of a row is its k-th unbroken run of response tokens; all of a row's tokens are its only turn.
        """
        if self._untold_rows:
            return None
        batch, (before, first_runs, _) = self.batch, self._runs
        row = np.repeat(np.arange(len(batch)), batch.response_lengths.numpy())
        is_only = batch.turn_offsets.diff().numpy()[row] == 1
        within = np.where(is_only, 0, before[1:][batch.response_mask.numpy()] - 1 - first_runs[row])
        return batch.turn_offsets[:-1][row] + torch.from_numpy(within)

    @cached_property
    def turn_ids(self) -> torch.Tensor | None:
        """The turn of each response token within its trajectory, int64 ``[M]``; ``None`` where not told."""
        if self.turns is None:
            return None
        firsts = self.batch.turn_offsets[self.first_rows]
        return self.turns - torch.repeat_interleave(firsts, self.offsets.diff())

    @cached_property
    def versions_behind(self) -> torch.Tensor | None:
        """The versions by which each token's policy was older than the policy under training, int64 ``[M]``.

        ``None`` where not told. A row of one version tells it without its turns.
        """
        batch, versions = self.batch, self.batch.policy_versions.long()
        if self.turns is not None:
            by_token = versions[self.turns]
        else:
            num_turns = batch.turn_offsets.diff()
            firsts = versions[batch.turn_offsets[:-1]] if bool((num_turns > 0).all()) else versions[:0]
            if not torch.equal(versions, torch.repeat_interleave(firsts, num_turns[: len(firsts)])):
                return None
            by_token = torch.repeat_interleave(firsts, batch.response_lengths)
        return (self.policy_version - by_token).clamp(min=0)

    def token_range(self, first: int, last: int) -> slice:
        """The response tokens of trajectories ``first`` to ``last`` - 1."""
        return slice(int(self.offsets[first]), int(self.offsets[last]))

    def inputs(
        self,
        train_logprobs: torch.Tensor,
        spec: CorrectionSpec,
        *,
        trajectories: tuple[int, int] | None = None,
        advantages: torch.Tensor | None = None,
    ) -> CorrectionInputs:
        """Makes the inputs of correction.

        Args:
            train_logprobs: Floating, one per response token of the trajectories.
            spec: The rules, which may need turns.
            trajectories: ``[first, last)``; all where ``None``.
            advantages: Floating ``[M]``, of the whole batch.

        Raises:
            CorrectionError: Names rows whose turns a rule needs and the mask does not tell apart.
        """
        first, last = trajectories or (0, len(self.first_rows))
        tokens, offsets = self.token_range(first, last), self.offsets[first : last + 1]
        if spec.needs_turns and self.turn_ids is None:
            raise CorrectionError(self._describe_untold())

        def part(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[tokens]

        return CorrectionInputs(
            train_logprobs=train_logprobs,
            rollout_logprobs=self.batch.rollout_logprobs[tokens],
            response_mask=torch.ones(tokens.stop - tokens.start, dtype=torch.bool),
            cu_seqlens=offsets - offsets[0],
            logprob_valid=part(self.valid),
            turn_ids=part(self.turn_ids) if spec.needs_turns else None,
            versions_behind=part(self.versions_behind),
            advantages=part(advantages),
        )

    @cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Runs begun before each token and at the end; each row's first run; each row's number of runs."""
        batch, mask = self.batch, self.batch.response_mask.numpy()
        starts = mask.copy()
        starts[1:] &= ~mask[:-1]
        first_tokens = batch.row_offsets[:-1].numpy()
        starts[first_tokens] = mask[first_tokens]
        before = np.concatenate(([0], starts.cumsum(dtype=np.int64)))
        return before, before[first_tokens], np.diff(before[batch.row_offsets.numpy()])

    @cached_property
    def _untold_rows(self) -> list[int]:
        """Rows whose runs of response tokens are not as many as their several turns."""
        num_runs, num_turns = self._runs[2], self.batch.turn_offsets.diff().numpy()
        is_told = (num_runs == num_turns) | (num_runs == 0) | (num_turns == 1)
        return [int(row) for row in np.flatnonzero(~is_told)]

    def _describe_untold(self) -> str:
        rows, num_turns = self._untold_rows, self.batch.turn_offsets.diff().tolist()
        named = [f"{self.batch.identities[row]}: {num_turns[row]} turns in {self._runs[2][row]} runs" for row in rows]
        return (
            f"rollout correction: a rule of level segment needs the turns of {count_of(len(rows), 'row')}, which "
            f"response_mask does not tell apart: {list_some(named, _NUM_LISTED, '; ')}. Give every turn one unbroken "
            "run of response tokens with an observation after it, or use another level"
        )
