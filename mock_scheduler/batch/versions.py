"""Finds the turns of response tokens, the policy version that sampled each, and its staleness.

Contract: everyone who speaks of staleness counts it here, by token: inspect, correction, and the metrics of a run. It
is signed, so that a token of a policy that does not exist yet has a negative one. A fact that the batch does not tell
is ``None`` and never guessed, as turns where the mask shows fewer of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.batch.columns import TensorColumn
from mock_scheduler.batch.engine_columns import VERSIONS_COLUMN
from mock_scheduler.batch.rollout_batch import RolloutBatch


def stated_versions(batch: RolloutBatch) -> torch.Tensor | None:
    """Reads int64 ``[M]``, the versions of response tokens by their column; ``None`` without one for each token."""
    column = batch.extras.get(VERSIONS_COLUMN)
    if not isinstance(column, TensorColumn) or column.offsets is None or column.values.dim() != 1:
        return None
    dtype = column.values.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return None
    return column.values.long() if torch.equal(column.offsets, batch.response_offsets) else None


@dataclass(frozen=True, kw_only=True)
class TokenTurns:
    """Holds the turns of a batch's M response tokens."""

    batch: RolloutBatch

    @cached_property
    def turns(self) -> torch.Tensor | None:
        """Returns the turn of each response token among the batch's turns, int64 ``[M]``; ``None`` where not told.

        The k-th turn of a row is its k-th unbroken run of response tokens; all of a row's tokens are its only turn.
        """
        if self.untold_rows:
            return None
        batch, (before, first_runs, _) = self.batch, self._runs
        row = np.repeat(np.arange(len(batch)), batch.response_lengths.numpy())
        is_only = batch.turn_offsets.diff().numpy()[row] == 1
        within = np.where(is_only, 0, before[1:][batch.response_mask.numpy()] - 1 - first_runs[row])
        return batch.turn_offsets[:-1][row] + torch.from_numpy(within)

    @cached_property
    def versions(self) -> torch.Tensor | None:
        """Returns the policy version that sampled each response token, int64 ``[M]``; ``None`` where not told.

        The column ``policy_versions_by_token`` tells it, else turns do, and a row of one version without its turns.
        """
        stated = stated_versions(self.batch)
        if stated is not None:
            return stated
        batch, versions = self.batch, self.batch.policy_versions.long()
        if self.turns is not None:
            return versions[self.turns]
        num_turns = batch.turn_offsets.diff()
        if not bool((num_turns > 0).all()):
            return None
        firsts = versions[batch.turn_offsets[:-1]]
        if not torch.equal(versions, torch.repeat_interleave(firsts, num_turns)):
            return None
        return torch.repeat_interleave(firsts, batch.response_lengths)

    @cached_property
    def untold_rows(self) -> list[int]:
        """Rows whose runs of response tokens are not as many as their several turns."""
        num_runs, num_turns = self.num_runs, self.batch.turn_offsets.diff().numpy()
        is_told = (num_runs == num_turns) | (num_runs == 0) | (num_turns == 1)
        return [int(row) for row in np.flatnonzero(~is_told)]

    @property
    def num_runs(self) -> npt.NDArray[np.int64]:
        """Returns unbroken runs of response tokens in each row, ``[B]``."""
        return self._runs[2]

    @cached_property
    def _runs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Runs begun before each token and at the end; each row's first run; each row's number of runs."""
        batch, mask = self.batch, self.batch.response_mask.numpy()
        starts = mask.copy()
        starts[1:] &= ~mask[:-1]
        first_tokens = batch.row_offsets[:-1].numpy()
        is_filled = first_tokens < len(mask)
        starts[first_tokens[is_filled]] = mask[first_tokens[is_filled]]
        before = np.concatenate(([0], starts.cumsum(dtype=np.int64)))
        return before, before[first_tokens], np.diff(before[batch.row_offsets.numpy()])


@dataclass(frozen=True, kw_only=True, slots=True)
class Staleness:
    """By how many versions the policies that sampled response tokens were older than the step's: least, mean, most.

    Negative: newer than the policy that the step was asked for.
    """

    minimum: int
    mean: float
    maximum: int


def measure_staleness(batch: RolloutBatch, policy_version: int) -> Staleness | None:
    """Measures the staleness of a batch's response tokens; ``None`` where the batch does not tell, or has none."""
    versions = TokenTurns(batch=batch).versions
    if versions is None or not len(versions):
        return None
    ages = policy_version - versions
    return Staleness(minimum=int(ages.min()), mean=float(ages.double().mean()), maximum=int(ages.max()))


def trajectory_index(batch: RolloutBatch) -> torch.Tensor:
    """Returns the trajectory of each row, int64 ``[B]``, counted from 0 in row order."""
    keys = [identity.trajectory_key for identity in batch.identities]
    is_new = torch.tensor([number > 0 and key != keys[number - 1] for number, key in enumerate(keys)], dtype=torch.bool)
    return is_new.cumsum(0)


def count_mixed(batch: RolloutBatch) -> int:
    """Counts the trajectories that were sampled by policies of several versions, in turns or within one."""
    of_row, stated = trajectory_index(batch), stated_versions(batch)
    pairs = [(batch.policy_versions, torch.repeat_interleave(of_row, batch.turn_offsets.diff()))]
    if stated is not None:
        pairs.append((stated, torch.repeat_interleave(of_row, batch.response_lengths)))
    changed = [index[1:][(of[1:] != of[:-1]) & (index[1:] == index[:-1])] for of, index in pairs]
    return len(torch.cat(changed).unique())
