"""Finds the trajectories, turns and response tokens of a batch, whatever its rows are.

The rows of a batch are in identity order. The rows of one trajectory therefore lie side by side, its turns in order,
and a trajectory is one segment of turns and one of response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.offsets import count_before
from mock_scheduler.batch.versions import trajectory_index


def trajectory_bounds(index: npt.NDArray[np.int64]) -> torch.Tensor:
    """Returns int64 ``[N + 1]``: the first row of each trajectory of ``trajectory_index``, and the number of rows."""
    is_new = np.ones(len(index) + 1, dtype=np.bool_)
    is_new[1:-1] = np.diff(index) > 0
    return torch.from_numpy(np.flatnonzero(is_new))


MAX_LISTED_ROWS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryTable:
    """Holds N trajectories with K turns and M response tokens in all.

    rewards: float64 ``[N]``, the sum of the stored rewards of a trajectory's rows. group_index: int64 ``[N]``, 0..G-1.
    turn_rewards: float64 ``[K]``. turn_offsets, token_offsets: int64 ``[N + 1]``, into turns and response tokens.
    """

    rewards: torch.Tensor
    group_index: torch.Tensor
    turn_rewards: torch.Tensor
    turn_offsets: torch.Tensor
    token_offsets: torch.Tensor


def build_trajectory_table(batch: RolloutBatch) -> TrajectoryTable:
    """The trajectories of a batch, in its order; a trajectory of several rows (``rollout_form: step``) counts once."""
    trajectory_of_row = trajectory_index(batch)
    bounds = trajectory_bounds(trajectory_of_row)
    first_rows = bounds[:-1]
    # -0.0 and not 0.0 to begin with, since -0.0 + x is x to the bit for every x.
    rewards = torch.full((len(first_rows),), -0.0, dtype=torch.float64)
    return TrajectoryTable(
        rewards=rewards.index_add(0, torch.from_numpy(trajectory_of_row), batch.rewards.double()),
        group_index=batch.group_index[first_rows],
        turn_rewards=batch.turn_rewards.double(),
        turn_offsets=batch.turn_offsets[bounds],
        token_offsets=batch.response_offsets[bounds],
    )


def find_turn_ends(batch: RolloutBatch) -> torch.Tensor:
    """Counts the response tokens of the batch up to the end of every turn, int64 ``[K]``.

    The tokens of a row's k-th turn are the k-th unbroken run of True in its response mask. A row of one turn belongs to
    it whole, however many runs it has; the turns of a row without response tokens end where the row does. Raises
    ``ValueError`` listing rows with several turns and another number of runs, whose turns cannot be told apart. They
    come from turns without an observation between them, or from cut masks.
    """
    row_offsets, mask = batch.row_offsets.numpy(), batch.response_mask.numpy()
    num_turns, response_offsets = batch.turn_offsets.diff().numpy(), batch.response_offsets.numpy()
    is_end = mask & ~np.append(mask[1:], False) if len(mask) else mask
    last_of_row = row_offsets[1:] - 1
    is_end[last_of_row] = mask[last_of_row]
    num_runs = np.diff(count_before(is_end)[row_offsets])
    is_told_apart = num_turns == num_runs
    _check_turns(batch, num_turns, num_runs, ~is_told_apart & (num_turns > 1) & (num_runs > 0))
    turn_ends = np.repeat(response_offsets[1:], num_turns)
    run_ends = mask.cumsum(dtype=np.int64)[is_end]
    turn_ends[np.repeat(is_told_apart, num_turns)] = run_ends[np.repeat(is_told_apart, num_runs)]
    return torch.from_numpy(turn_ends)


def _check_turns(batch: RolloutBatch, num_turns: np.ndarray, num_runs: np.ndarray, is_unclear: np.ndarray) -> None:
    rows = np.flatnonzero(is_unclear).tolist()
    if not rows:
        return
    listed = [f"{batch.identities[row]}: {num_turns[row]} turns in {num_runs[row]} runs" for row in rows]
    more = f"; and {len(rows) - MAX_LISTED_ROWS} more" if len(rows) > MAX_LISTED_ROWS else ""
    raise ValueError(
        f"response_mask does not tell the turns of {len(rows)} rows apart, so their rewards have no token to land on: "
        f"{'; '.join(listed[:MAX_LISTED_ROWS])}{more}. Give every turn one unbroken run of response tokens with an "
        "observation after it, or use adv_estimator grpo or rloo, or reward_normalization.method mean_std, which need "
        "no reward per turn"
    )
