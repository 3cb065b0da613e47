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

from mock_scheduler.batch.columns import TensorColumn
from mock_scheduler.batch.engine_columns import VERSIONS_COLUMN
from mock_scheduler.batch.offsets import count_before
from mock_scheduler.batch.rollout_batch import RolloutBatch


def stated_versions(batch: RolloutBatch) -> npt.NDArray[np.int64] | None:
    """Reads int64 ``[M]``, the versions of response tokens by their column; ``None`` without one for each token."""
    column = batch.extras.get(VERSIONS_COLUMN)
    if not isinstance(column, TensorColumn):
        return None
    values, bounds = column.raw.array(), column.bounds
    if values is None or values.ndim != 1 or values.dtype.kind not in "iu" or bounds is None:
        return None
    return values.astype(np.int64) if np.array_equal(bounds, batch.arrays["response_offsets"]) else None


@dataclass(frozen=True, kw_only=True)
class TokenTurns:
    """Holds the turns of a batch's M response tokens."""

    batch: RolloutBatch

    @cached_property
    def turns(self) -> npt.NDArray[np.int64] | None:
        """Returns the turn of each response token among the batch's turns, int64 ``[M]``; ``None`` where not told.

        The k-th turn of a row is its k-th unbroken run of response tokens; all of a row's tokens are its only turn.
        """
        if self.untold_rows:
            return None
        arrays, (before, first_runs, _) = self.batch.arrays, self._runs
        row = np.repeat(np.arange(len(self.batch)), arrays["response_lengths"])
        within = np.where(arrays["num_turns"][row] == 1, 0, before[1:][arrays["response_mask"]] - 1 - first_runs[row])
        turns: npt.NDArray[np.int64] = arrays["turn_offsets"][:-1][row] + within
        return turns

    @cached_property
    def versions(self) -> npt.NDArray[np.int64] | None:
        """Returns the policy version that sampled each response token, int64 ``[M]``; ``None`` where not told.

        The column ``policy_versions_by_token`` tells it, else turns do, and a row of one version without its turns.
        """
        stated = stated_versions(self.batch)
        if stated is not None:
            return stated
        arrays = self.batch.arrays
        versions: npt.NDArray[np.int64] = arrays["policy_versions"].astype(np.int64)
        if self.turns is not None:
            return versions[self.turns]
        if not (arrays["num_turns"] > 0).all():
            return None
        firsts = versions[arrays["turn_offsets"][:-1]]
        if not np.array_equal(versions, np.repeat(firsts, arrays["num_turns"])):
            return None
        return np.repeat(firsts, arrays["response_lengths"])

    @cached_property
    def untold_rows(self) -> list[int]:
        """Rows whose runs of response tokens are not as many as their several turns."""
        num_runs, num_turns = self.num_runs, self.batch.arrays["num_turns"]
        is_told = (num_runs == num_turns) | (num_runs == 0) | (num_turns == 1)
        return [int(row) for row in np.flatnonzero(~is_told)]

    @property
    def num_runs(self) -> npt.NDArray[np.int64]:
        """Returns unbroken runs of response tokens in each row, ``[B]``."""
        return self._runs[2]

    @cached_property
    def _runs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Runs begun before each token and at the end; each row's first run; each row's number of runs."""
        offsets, mask = self.batch.arrays["row_offsets"], self.batch.arrays["response_mask"]
        starts = mask.copy()
        starts[1:] &= ~mask[:-1]
        first_tokens = offsets[:-1]
        is_filled = first_tokens < len(mask)
        starts[first_tokens[is_filled]] = mask[first_tokens[is_filled]]
        before = count_before(starts)
        return before, before[first_tokens], np.diff(before[offsets])


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
    return Staleness(minimum=int(ages.min()), mean=float(ages.mean()), maximum=int(ages.max()))


def trajectory_index(batch: RolloutBatch) -> npt.NDArray[np.int64]:
    """Returns the trajectory of each row, int64 ``[B]``, counted from 0 in row order."""
    keys = [identity.trajectory_key for identity in batch.identities]
    is_new = np.array([number > 0 and key != keys[number - 1] for number, key in enumerate(keys)], dtype=np.bool_)
    return is_new.cumsum(dtype=np.int64)


def count_mixed(batch: RolloutBatch) -> int:
    """Counts the trajectories that were sampled by policies of several versions, in turns or within one."""
    of_row, stated, arrays = trajectory_index(batch), stated_versions(batch), batch.arrays
    pairs = [(arrays["policy_versions"], np.repeat(of_row, arrays["num_turns"]))]
    if stated is not None:
        pairs.append((stated, np.repeat(of_row, arrays["response_lengths"])))
    changed = [index[1:][(of[1:] != of[:-1]) & (index[1:] == index[:-1])] for of, index in pairs]
    return len(np.unique(np.concatenate(changed)))
