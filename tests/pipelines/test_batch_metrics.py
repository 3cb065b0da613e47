"""Metrics of a batch against means worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mock_scheduler.batch import RolloutBatch, Termination, Trajectory
from mock_scheduler.batch.columns import Ragged, RowValue
from mock_scheduler.errors import BatchError
from pipelines.batch_metrics import compute_batch_metrics, compute_success_by_length
from tests.recording.builders import SAMPLING, make_row

T, F = True, False


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


def episode(env_id: int, turn_rewards: Sequence[float], *, truncated: bool = False, **extras: RowValue) -> Trajectory:
    """Turn t reads token 100 + t and samples token t; of as many turns as there are rewards."""
    tokens = [token for turn in range(len(turn_rewards)) for token in (100 + turn, turn + env_id)]
    row = make_row(
        0,
        env_id,
        tokens=tokens,
        response=[False, True] * len(turn_rewards),
        rollout_logprobs=[-0.5] * len(turn_rewards),
        turn_rewards=turn_rewards,
        prompt_length=1,
    )
    return replace(row, termination=Termination.TRUNCATED if truncated else Termination.TERMINATED, extras=extras)


def as_steps(row: Trajectory, *, keeps_history: bool) -> list[Trajectory]:
    """The rows of the same episode, one per turn, of which each starts with all that came before, or with nothing."""
    rows = []
    for turn, reward in enumerate(row.turn_rewards.tolist()):
        start = 0 if keeps_history else 2 * turn
        tokens = row.tokens[start : 2 * turn + 2]
        mask = torch.zeros(len(tokens), dtype=torch.bool)
        mask[-1] = True
        is_last = turn + 1 == len(row.turn_rewards)
        rows.append(
            replace(
                row,
                identity=replace(row.identity, turn=turn),
                tokens=tokens,
                response_mask=mask,
                rollout_logprobs=row.rollout_logprobs[turn : turn + 1],
                turn_rewards=torch.tensor([reward], dtype=torch.float32),
                policy_versions=row.policy_versions[:1],
                prompt_length=len(tokens) - 1,
                termination=row.termination if is_last else Termination.TERMINATED,
                extras={
                    name: value if is_last else torch.zeros_like(value)  # type: ignore[arg-type]
                    for name, value in row.extras.items()
                },
            )
        )
    return rows


def batch_of(rows: Sequence[Trajectory], *, group_size: int) -> RolloutBatch:
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=group_size)


@pytest.mark.parametrize("keeps_history", [True, False])
@pytest.mark.parametrize("states_success", [True, False])
def test_step_form_gives_the_numbers_of_trajectory_form(keeps_history: bool, states_success: bool) -> None:
    """Rewards 0.1 + 0.2 + 1, 1 - 0.1 and -0.1: sums that float32 and float64 round differently."""
    episodes = [episode(0, (0.1, 0.2, 1.0)), episode(1, (1.0, -0.1), truncated=True), episode(2, (-0.1,))]
    if states_success:
        flags = (False, True, True)
        episodes = [
            replace(row, extras={"success": torch.tensor(flag), "optimal_length": torch.tensor(3 + flag)})
            for row, flag in zip(episodes, flags, strict=True)
        ]
    whole = batch_of(episodes, group_size=3)
    steps = batch_of([step for row in episodes for step in as_steps(row, keeps_history=keeps_history)], group_size=3)
    assert (len(whole), len(steps)) == (3, 6)
    metrics = compute_batch_metrics(steps)
    assert metrics == compute_batch_metrics(whole)
    rewards = [float(torch.tensor(value, dtype=torch.float32)) for value in (1.3, 0.9, -0.1)]
    mean = sum(rewards) / 3
    assert metrics["reward"] == pytest.approx(mean, rel=1e-15)
    assert metrics["group_reward_std"] == pytest.approx((sum((r - mean) ** 2 for r in rewards) / 3) ** 0.5, rel=1e-12)
    # The last turn's reward is positive in the first episode only.
    assert metrics["success"] == pytest.approx(2 / 3 if states_success else 1 / 3)
    assert (metrics["num_turns"], metrics["num_tokens"], metrics["truncated"]) == (2.0, 4.0, pytest.approx(1 / 3))
    assert compute_success_by_length(steps) == compute_success_by_length(whole)
    assert bool(compute_success_by_length(whole)) is states_success


def test_tokens_of_a_window_of_the_history_count_in_full() -> None:
    """The second row starts in the middle of the first, so that nothing says what it repeats."""
    rows = [
        make_row(0, 0, turn=0, tokens=(1, 2, 3, 4)),
        make_row(0, 0, turn=1, tokens=(3, 4, 5, 6)),
        make_row(0, 0, turn=2, tokens=(3, 4, 5, 6, 7), response=(F, F, F, T, T)),
    ]
    assert compute_batch_metrics(batch_of(rows, group_size=1))["num_tokens"] == 9.0


def test_success_is_what_the_batch_says_and_else_the_last_reward() -> None:
    """An environment whose last reward is positive without success, and the other way round."""
    rows = [episode(0, (1.0,)), episode(1, (-0.1,)), episode(2, (-0.1,)), episode(3, (-0.1,))]
    assert compute_batch_metrics(batch_of(rows, group_size=4))["success"] == 0.25
    for flags in ([F, T, T, F], [torch.tensor(flag) for flag in (F, T, T, F)]):
        stated = [replace(row, extras={"success": flag}) for row, flag in zip(rows, flags, strict=True)]
        assert compute_batch_metrics(batch_of(stated, group_size=4))["success"] == 0.5


def test_success_is_counted_by_the_length_of_the_shortest_solution() -> None:
    values = [(2, T), (6, F), (2, F), (6, F), (-1, T), (10, T), (2, T)]
    rows = [
        episode(env_id, (0.0,), success=success, optimal_length=length)
        for env_id, (length, success) in enumerate(values)
    ]
    metrics = compute_success_by_length(batch_of(rows, group_size=7))
    assert list(metrics.items()) == [
        ("success/length_2", pytest.approx(2 / 3)),
        ("episodes/length_2", 3.0),
        ("success/length_6", 0.0),
        ("episodes/length_6", 2.0),
        ("success/length_10", 1.0),
        ("episodes/length_10", 1.0),
    ]


def test_a_batch_that_knows_no_shortest_solution_gives_no_success_by_length() -> None:
    assert compute_success_by_length(batch_of([episode(0, (1.0,))], group_size=1)) == {}


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("success", torch.tensor(1.0), "torch.float32 [1] on cpu; expected one bool per row"),
        ("success", torch.tensor([True]), "torch.bool [1, 1] on cpu; expected one bool per row"),
        ("success", Ragged(torch.tensor([True])), "ragged torch.bool [1] on cpu; expected one bool per row"),
        ("success", 1, "JSON of int; expected one bool per row"),
        ("optimal_length", torch.tensor(True), "torch.bool [1] on cpu; expected one int per row"),
        ("optimal_length", torch.tensor(2.0), "torch.float32 [1] on cpu; expected one int per row"),
        ("optimal_length", None, "JSON of NoneType; expected one int per row"),
        ("optimal_length", True, "JSON of bool; expected one int per row"),
    ],
)
def test_an_extra_of_another_kind_is_refused(name: str, value: RowValue, found: str) -> None:
    batch = batch_of([episode(0, (1.0,), **{name: value})], group_size=1)
    with pytest.raises(BatchError) as caught:
        compute_success_by_length(batch)
    assert str(caught.value) == f"extra {name!r} is {found}, from which the metrics are computed"
