"""Episodes in lock-step with a scripted environment and sampler: tokens, masks, logprobs, rewards and ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from mock_scheduler.batch import SampleIdentity, Termination, Trajectory
from pipelines.environments.base import StepResult
from pipelines.rollout.episodes import Episode, play_episodes


class ScriptedEnvironment:
    """Prompt [1, seed]; turn k answers [100 + k] with reward k; ends after ``num_turns`` as told."""

    def __init__(self, *, num_turns: int, truncates: bool = False, prompt_length: int = 2) -> None:
        self.num_turns = num_turns
        self.truncates = truncates
        self.prompt_length = prompt_length
        self.actions: list[int] = []

    def reset(self, seed: int) -> list[int]:
        self.actions = []
        return [1, seed, *[7] * (self.prompt_length - 2)]

    def step(self, token: int) -> StepResult:
        self.actions.append(token)
        turn = len(self.actions)
        is_last = turn == self.num_turns
        return StepResult(
            observation=[100 + turn],
            reward=float(turn),
            terminated=is_last and not self.truncates,
            truncated=is_last and self.truncates,
        )

    def close(self) -> None:
        """Nothing to free."""


class ScriptedSampler:
    """Answers token 1000·call + row with logprob -call, and keeps what it was asked."""

    def __init__(self) -> None:
        self.prefixes: list[list[list[int]]] = []
        self.uniforms: list[list[float]] = []

    def __call__(self, prefixes: Sequence[Sequence[int]], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
        self.prefixes.append([list(prefix) for prefix in prefixes])
        self.uniforms.append(list(uniforms))
        call = len(self.prefixes)
        return [1000 * call + row for row in range(len(prefixes))], [-float(call)] * len(prefixes)


def make_episode(env_id: int, environment: ScriptedEnvironment) -> Episode:
    identity = SampleIdentity(scheduler_id="default", group_id=0, episode_id=0, env_id=env_id, turn=0)
    return Episode(identity=identity, tag="Scripted", environment=environment, seed=50 + env_id)


def play(
    environments: Sequence[ScriptedEnvironment], *, sequence_length: int = 100
) -> tuple[list[Trajectory], ScriptedSampler]:
    sampler = ScriptedSampler()
    episodes = [make_episode(env_id, environment) for env_id, environment in enumerate(environments)]
    trajectories = play_episodes(
        episodes,
        sampler,
        lambda identity, turn: identity.env_id + turn / 8,
        sequence_length=sequence_length,
        policy_version=3,
    )
    return trajectories, sampler


def test_an_episode_is_prompt_then_action_and_answer_by_turns() -> None:
    (row,), _ = play([ScriptedEnvironment(num_turns=3)])
    assert row.tokens.tolist() == [1, 50, 1000, 101, 2000, 102, 3000]
    assert row.response_mask.tolist() == [False, False, True, False, True, False, True]
    assert row.rollout_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert row.turn_rewards.tolist() == [1.0, 2.0, 3.0]
    assert row.policy_versions.tolist() == [3, 3, 3]
    assert (row.prompt_length, row.termination, row.tag) == (2, Termination.TERMINATED, "Scripted")
    assert (row.tokens.dtype, row.rollout_logprobs.dtype) == (torch.int32, torch.float32)


def test_running_episodes_go_in_lock_step_and_ended_ones_are_asked_no_more() -> None:
    rows, sampler = play([ScriptedEnvironment(num_turns=1), ScriptedEnvironment(num_turns=2)])
    assert sampler.prefixes == [[[1, 50], [1, 51]], [[1, 51, 1001, 101]]]
    # The number that decides a token goes by identity and turn, not by the row in the call.
    assert sampler.uniforms == [[0.0, 1.0], [1.125]]
    assert [row.tokens.tolist() for row in rows] == [[1, 50, 1000], [1, 51, 1001, 101, 2000]]


def test_rows_come_back_in_the_given_order_whoever_ends_first() -> None:
    rows, _ = play([ScriptedEnvironment(num_turns=3), ScriptedEnvironment(num_turns=1)])
    assert [row.identity.env_id for row in rows] == [0, 1]


def test_an_environment_that_truncates_is_recorded_as_truncated() -> None:
    (row,), _ = play([ScriptedEnvironment(num_turns=2, truncates=True)])
    assert row.termination is Termination.TRUNCATED
    assert row.tokens.tolist() == [1, 50, 1000, 101, 2000]


def test_an_answer_that_leaves_no_room_for_an_action_is_not_read() -> None:
    """After the second action there are 5 tokens; its answer would make 6, and an action needs one place more."""
    (row,), _ = play([ScriptedEnvironment(num_turns=9)], sequence_length=6)
    assert row.termination is Termination.TRUNCATED
    assert row.tokens.tolist() == [1, 50, 1000, 101, 2000]
    assert row.turn_rewards.tolist() == [1.0, 2.0]


def test_an_episode_may_fill_the_sequence_exactly() -> None:
    (row,), _ = play([ScriptedEnvironment(num_turns=9)], sequence_length=7)
    assert row.tokens.tolist() == [1, 50, 1000, 101, 2000, 102, 3000]
    assert row.termination is Termination.TRUNCATED


def test_a_first_prompt_without_room_ends_its_episode_with_no_response() -> None:
    rows, sampler = play([ScriptedEnvironment(num_turns=1, prompt_length=6), ScriptedEnvironment(num_turns=1)],
                         sequence_length=6)  # fmt: skip
    assert rows[0].termination is Termination.TRUNCATED
    assert rows[0].response_mask.tolist() == [False] * 6
    assert rows[0].turn_rewards.tolist() == []
    assert rows[1].termination is Termination.TERMINATED
    assert sampler.prefixes == [[[1, 51]]]


def test_an_unfinished_episode_is_no_trajectory() -> None:
    episode = make_episode(4, ScriptedEnvironment(num_turns=1))
    with pytest.raises(RuntimeError, match=r"^episode default/group 0/episode 0/env 4/turn 0 has not ended$"):
        episode.trajectory(0)
