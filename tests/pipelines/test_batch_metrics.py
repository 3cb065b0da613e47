"""Metrics of a batch against means worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mock_scheduler.batch import RolloutBatch, Termination
from pipelines.batch_metrics import compute_batch_metrics
from tests.recording.builders import SAMPLING, make_row


def test_every_metric_of_four_rows_by_hand() -> None:
    """Rewards 1, 0 | 0.5, 0.5: group deviations 0.5 and 0; the third row's reward came before its last turn."""
    rows = [
        make_row(0, 0, turn_rewards=(0.0, 1.0)),
        make_row(0, 1, tokens=(1, 2, 3), response=(False, False, True), rollout_logprobs=(-1.0,), turn_rewards=(0.0,)),
        make_row(1, 0, turn_rewards=(0.5, 0.0), tokens=(1, 2, 3, 9)),
        replace(make_row(1, 1, turn_rewards=(0.0, 0.0, 0.5)), termination=Termination.TRUNCATED),
    ]
    batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=2)
    assert compute_batch_metrics(batch) == {
        "reward": 0.5,
        "success": 0.5,
        "num_turns": 2.0,
        "num_tokens": 3.75,
        "truncated": 0.25,
        "duplicate_rows": 0.0,
        "group_reward_std": 0.25,
    }


def test_a_row_without_turns_counts_as_no_success() -> None:
    """Its first prompt left no room: no response, no reward, and no last turn to take another row's reward from."""
    empty = make_row(0, 1, response=(False,) * 4, rollout_logprobs=(), turn_rewards=())
    batch = RolloutBatch.from_trajectories([make_row(0, 0), empty], sampling=SAMPLING, group_size=2)
    metrics = compute_batch_metrics(batch)
    assert (metrics["success"], metrics["reward"], metrics["num_turns"]) == (0.5, 0.5, 1.0)


def test_equal_rows_are_counted_as_duplicates() -> None:
    rows = [make_row(0, env_id) for env_id in range(3)]
    batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=3)
    assert compute_batch_metrics(batch)["duplicate_rows"] == 2.0


def test_means_do_not_depend_on_arrival_order() -> None:
    rows = [make_row(0, env_id, turn_rewards=(0.1 * env_id,)) for env_id in range(4)]
    one = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=4)
    other = RolloutBatch.from_trajectories(rows[::-1], sampling=SAMPLING, group_size=4)
    assert compute_batch_metrics(one) == compute_batch_metrics(other)
    # Deviations of 0, 0.1, 0.2, 0.3 from their mean 0.15: variance 0.0125.
    assert compute_batch_metrics(one)["group_reward_std"] == pytest.approx(0.0125**0.5, rel=1e-6)
