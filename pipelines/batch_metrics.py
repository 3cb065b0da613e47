"""Metrics of a rollout batch, computed from its content, so that a replayed batch gives the same numbers."""

from __future__ import annotations

from mock_scheduler.batch import RolloutBatch, Termination


def compute_batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Means over trajectories, in float64.

    ``reward``: total reward. ``success``: fraction whose last turn has a positive reward, which for FrozenLake means
    that the goal was reached. ``num_turns``, ``num_tokens``: per trajectory. ``truncated``: fraction cut by the turn
    or length limit. ``duplicate_rows``: number of rows whose content occurred before in the batch.
    ``group_reward_std``: mean over groups of the population standard deviation of the total reward; 0 means that no
    group has anything to learn from.
    """
    num_turns = batch.turn_offsets.diff()
    has_turns = num_turns > 0
    last_turn = (batch.turn_offsets[1:] - 1)[has_turns]
    rewards = batch.rewards.double()
    group_index, num_groups = batch.group_index, batch.num_groups
    ones = rewards.new_ones(len(batch))
    sizes = rewards.new_zeros(num_groups).index_add(0, group_index, ones)
    means = rewards.new_zeros(num_groups).index_add(0, group_index, rewards) / sizes
    squares = (rewards - means[group_index]).square()
    variances = rewards.new_zeros(num_groups).index_add(0, group_index, squares) / sizes
    return {
        "reward": float(rewards.mean()),
        "success": float((batch.turn_rewards[last_turn] > 0).double().sum() / len(batch)),
        "num_turns": float(num_turns.double().mean()),
        "num_tokens": float(batch.lengths.double().mean()),
        "truncated": float((batch.terminations == int(Termination.TRUNCATED)).double().mean()),
        "duplicate_rows": float(batch.num_duplicate_rows),
        "group_reward_std": float(variances.sqrt().mean()),
    }
