"""A rollout batch as correction sees it: trajectories one after another, and facts of their tokens.

Contract: a sequence is a trajectory, of one row or of several, and a segment one of its turns. A fact that the batch
does not tell is ``None`` and never guessed, as turns where the mask shows fewer of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.plausibility import valid_logprobs
from mock_scheduler.batch.versions import TokenTurns
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.engine.inputs import CorrectionInputs
from mock_scheduler.errors import CorrectionError
from mock_scheduler.support.text import count_of, list_some

_NUM_LISTED = 8


def _as_tensor(values: npt.NDArray[np.generic] | None) -> torch.Tensor | None:
    return None if values is None else torch.from_numpy(values)


@dataclass(frozen=True, kw_only=True)
class BatchTokens:
    """A batch with M response tokens in S trajectories; policy_version: the version of the policy under training."""

    batch: RolloutBatch
    policy_version: int

    @cached_property
    def first_rows(self) -> list[int]:
        """Returns the first row of every trajectory, ``[S]``."""
        keys = [identity.trajectory_key for identity in self.batch.identities]
        return [row for row, key in enumerate(keys) if row == 0 or key != keys[row - 1]]

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Returns the starts of each trajectory's response tokens, int64 ``[S + 1]``."""
        return self.batch.response_offsets[[*self.first_rows, len(self.batch)]]

    @cached_property
    def valid(self) -> torch.Tensor | None:
        """Returns bool ``[M]``, False where the engine gave no log-probability; ``None`` without a sound column."""
        return _as_tensor(valid_logprobs(self.batch))

    @cached_property
    def _token_turns(self) -> TokenTurns:
        return TokenTurns(batch=self.batch)

    @cached_property
    def turns(self) -> torch.Tensor | None:
        """Returns the turn of each response token among the batch's turns, int64 ``[M]``; ``None`` where not told."""
        return _as_tensor(self._token_turns.turns)

    @cached_property
    def turn_ids(self) -> torch.Tensor | None:
        """Returns the turn of each response token within its trajectory, int64 ``[M]``; ``None`` where not told."""
        if self.turns is None:
            return None
        firsts = self.batch.turn_offsets[self.first_rows]
        return self.turns - torch.repeat_interleave(firsts, self.offsets.diff())

    @cached_property
    def versions_behind(self) -> torch.Tensor | None:
        """The versions by which each token's policy was older than the policy under training, int64 ``[M]``.

        Negative where it was newer; ``None`` where not told.
        """
        versions = _as_tensor(self._token_turns.versions)
        return None if versions is None else self.policy_version - versions

    def token_range(self, first: int, last: int) -> slice:
        """Returns the response tokens of trajectories ``first`` to ``last`` - 1."""
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

    def _describe_untold(self) -> str:
        rows, num_turns = self._token_turns.untold_rows, self.batch.turn_offsets.diff().tolist()
        num_runs = self._token_turns.num_runs
        named = [f"{self.batch.identities[row]}: {num_turns[row]} turns in {num_runs[row]} runs" for row in rows]
        return (
            f"rollout correction: a rule of level segment needs the turns of {count_of(len(rows), 'row')}, which "
            f"response_mask does not tell apart: {list_some(named, _NUM_LISTED, '; ')}. Give every turn one unbroken "
            "run of response tokens with an observation after it, or use another level"
        )
