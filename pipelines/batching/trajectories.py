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
