"""Which rows of a batch make up one trajectory."""

from __future__ import annotations

import torch

from mock_scheduler.batch import RolloutBatch


def trajectory_index(batch: RolloutBatch) -> torch.Tensor:
    """int64 ``[B]``: 0 to ``num_trajectories`` - 1 in row order; equal where rows are turns of one trajectory.

    It never falls, since the rows of a trajectory are neighbours in identity order.
    """
    keys = [identity.trajectory_key for identity in batch.identities]
    index = {key: position for position, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([index[key] for key in keys], dtype=torch.int64)


def trajectory_bounds(index: torch.Tensor) -> torch.Tensor:
    """int64 ``[N + 1]``: the first row of each trajectory of ``trajectory_index``, and the number of rows."""
    is_new = torch.ones(len(index) + 1, dtype=torch.bool)
    is_new[1:-1] = index.diff() > 0
    return torch.nonzero(is_new).flatten()
