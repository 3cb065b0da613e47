"""Episodes of a block with scripted environments and sampler: turns, tokens, logprobs, ends, and rows of both forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory
from pipelines.environments.base import ResetRequest, ResetResult, StepResult
from pipelines.rollout.episodes import Episode, RolloutForm, episode_rows, play_block
from pipelines.rollout.plan import EpisodePlan
from pipelines.rollout.turns import TokenwiseTurns, TurnRules

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
ACTIONS_FROM = 1000  # tokens below name no action


@dataclass(kw_only=True)
class Script:
    """Prompt [1, seed]; turn k answers [100 + k] with reward k; ends after ``num_turns`` as told, by success if so."""

    num_turns: int
    truncates: bool = False
    prompt_length: int = 2
    actions: list[int] = field(default_factory=list)

    def step(self, token: int) -> StepResult:
        self.actions.append(token)
        turn = len(self.actions)
        is_last = turn == self.num_turns
        return StepResult(
            observation=[100 + turn],
            reward=float(turn),
            terminated=is_last and not self.truncates,
            truncated=is_last and self.truncates,
            is_valid=token >= ACTIONS_FROM,
            is_success=is_last and not self.truncates,
        )


class ScriptedEnvironments:
    """One script per slot; keeps what it was asked."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts = scripts
        self.requests: list[ResetRequest] = []
        self.calls: list[list[tuple[int, list[int]]]] = []

    def reset_many(self, requests: Sequence[ResetRequest]) -> list[ResetResult]:
        self.requests += requests
        lengths = [self.scripts[request.slot].prompt_length for request in requests]
        return [
            ResetResult(
                observation=[1, request.seed, *[7] * (length - 2)],
                optimal_length=request.slot + 4,
                layout_digest=f"board{request.slot}",
            )
            for request, length in zip(requests, lengths, strict=True)
        ]

    def step_many(self, turns: Sequence[tuple[int, Sequence[int]]]) -> list[StepResult]:
        self.calls.append([(slot, list(tokens)) for slot, tokens in turns])
        return [self.scripts[slot].step(tokens[-1]) for slot, tokens in turns]


class ScriptedSampler:
    """Answers token 1000·call + row with logprob -call, or what ``tokens`` says by (call, row), and keeps the calls."""

    def __init__(self, tokens: Mapping[tuple[int, int], int] | None = None) -> None:
        self.tokens = tokens or {}
        self.rows: list[list[int]] = []
        self.histories: list[list[list[int]]] = []
        self.uniforms: list[list[float]] = []

    def __call__(
        self, rows: Sequence[int], histories: Sequence[Sequence[int]], uniforms: Sequence[float]
    ) -> tuple[list[int], list[float]]:
        self.rows.append(list(rows))
        self.histories.append([list(history) for history in histories])
        self.uniforms.append(list(uniforms))
        call = len(self.rows)
        return [self.tokens.get((call, row), 1000 * call + row) for row in rows], [-float(call)] * len(rows)


def make_plan(env_id: int) -> EpisodePlan:
    identity = SampleIdentity(scheduler_id="default", group_id=0, episode_id=0, env_id=env_id, turn=0)
    return EpisodePlan(identity=identity, tag="Scripted", seed=50 + env_id, split="train")


@dataclass(frozen=True, kw_only=True)
class Played:
    """What was played, and what was asked for it."""

    episodes: list[Episode]
    sampler: ScriptedSampler
    environments: ScriptedEnvironments

    def rows(self, form: RolloutForm = "trajectory") -> list[Trajectory]:
        return [row for episode in self.episodes for row in episode_rows(episode, form, policy_version=3)]


def play(
    *scripts: Script,
    sequence_length: int = 100,
    max_new_tokens: int = 1,
    tokens: Mapping[tuple[int, int], int] | None = None,
) -> Played:
    sampler, environments = ScriptedSampler(tokens), ScriptedEnvironments(scripts)
    rules = TurnRules(
        ends_turn=lambda token: token >= ACTIONS_FROM, max_new_tokens=max_new_tokens, sequence_length=sequence_length
    )
    episodes = play_block(
        [make_plan(env_id) for env_id in range(len(scripts))],
        environments,
        TokenwiseTurns(sampler, lambda identity, turn, index: identity.env_id + turn / 8 + index / 64, rules),
        rules=rules,
    )
    return Played(episodes=episodes, sampler=sampler, environments=environments)


def test_an_episode_is_prompt_then_action_and_answer_by_turns() -> None:
    (row,) = play(Script(num_turns=3)).rows()
    assert row.tokens.tolist() == [1, 50, 1000, 101, 2000, 102, 3000]
    assert row.response_mask.tolist() == [False, False, True, False, True, False, True]
    assert row.rollout_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert row.turn_rewards.tolist() == [1.0, 2.0, 3.0]
    assert row.policy_versions.tolist() == [3, 3, 3]
    assert (row.prompt_length, row.termination, row.tag) == (2, Termination.TERMINATED, "Scripted")
    assert (row.tokens.dtype, row.rollout_logprobs.dtype) == (torch.int32, torch.float32)


def test_running_episodes_go_in_lock_step_and_ended_ones_are_asked_no_more() -> None:
    played = play(Script(num_turns=1), Script(num_turns=2))
    assert played.sampler.rows == [[0, 1], [1]]
    assert played.sampler.histories == [[[1, 50], [1, 51]], [[1, 51, 1001, 101]]]
    # The number that decides a token goes by identity and turn, not by the row in the call.
    assert played.sampler.uniforms == [[0.0, 1.0], [1.125]]
    assert [row.tokens.tolist() for row in played.rows()] == [[1, 50, 1000], [1, 51, 1001, 101, 2001]]


def test_environments_are_reset_by_plan_and_stepped_by_row() -> None:
    played = play(Script(num_turns=1), Script(num_turns=2))
    assert played.environments.requests == [
        ResetRequest(slot=0, tag="Scripted", seed=50, split="train"),
        ResetRequest(slot=1, tag="Scripted", seed=51, split="train"),
    ]
    assert played.environments.calls == [[(0, [1000]), (1, [1001])], [(1, [2001])]]


def test_rows_come_back_in_the_given_order_whoever_ends_first() -> None:
    played = play(Script(num_turns=3), Script(num_turns=1))
    assert [row.identity.env_id for row in played.rows()] == [0, 1]


def test_an_environment_that_truncates_is_recorded_as_truncated() -> None:
    (row,) = play(Script(num_turns=2, truncates=True)).rows()
    assert row.termination is Termination.TRUNCATED
    assert row.tokens.tolist() == [1, 50, 1000, 101, 2000]


def test_an_answer_that_leaves_no_room_for_an_action_is_not_read() -> None:
    """After the second action there are 5 tokens; its answer would make 6, and an action needs one place more."""
    (row,) = play(Script(num_turns=9), sequence_length=6).rows()
    assert row.termination is Termination.TRUNCATED
    assert row.tokens.tolist() == [1, 50, 1000, 101, 2000]
    assert row.turn_rewards.tolist() == [1.0, 2.0]


def test_an_episode_may_fill_the_sequence_exactly() -> None:
    (row,) = play(Script(num_turns=9), sequence_length=7).rows()
    assert row.tokens.tolist() == [1, 50, 1000, 101, 2000, 102, 3000]
    assert row.termination is Termination.TRUNCATED


@pytest.mark.parametrize("form", ["trajectory", "step"])
def test_a_first_prompt_without_room_ends_its_episode_with_no_response(form: RolloutForm) -> None:
    played = play(Script(num_turns=1, prompt_length=6), Script(num_turns=1), sequence_length=6)
    first, second = played.rows(form)
    assert first.termination is Termination.TRUNCATED
    assert first.response_mask.tolist() == [False] * 6
    assert (first.turn_rewards.tolist(), first.prompt_length) == ([], 6)
    assert second.termination is Termination.TERMINATED
    assert played.sampler.histories == [[[1, 51]]]


def test_an_unfinished_episode_is_no_row() -> None:
    message = r"^episode default/group 0/episode 0/env 4/turn 0 has not ended$"
    with pytest.raises(RuntimeError, match=message):
        episode_rows(Episode(plan=make_plan(4)), "trajectory", policy_version=0)


def test_a_turn_ends_with_its_first_action_token() -> None:
    """The first call's token is no action, so the second call goes on with the turn; its token is one."""
    played = play(Script(num_turns=1), max_new_tokens=4, tokens={(1, 0): 30})
    assert played.environments.calls == [[(0, [30, 2000])]]
    (row,) = played.rows()
    assert row.tokens.tolist() == [1, 50, 30, 2000]
    assert row.response_mask.tolist() == [False, False, True, True]
    assert row.rollout_logprobs.tolist() == [-1.0, -2.0]
    assert row.turn_rewards.tolist() == [1.0]
    assert played.sampler.uniforms == [[0.0], [1 / 64]]


def test_a_turn_without_an_action_token_goes_to_the_environment_when_it_is_full() -> None:
    played = play(Script(num_turns=2), max_new_tokens=2, tokens={(1, 0): 30, (2, 0): 31})
    assert played.environments.calls == [[(0, [30, 31])], [(0, [3000])]]
    (row,) = played.rows()
    assert row.tokens.tolist() == [1, 50, 30, 31, 101, 3000]
    assert int(row.extras["num_invalid_actions"]) == 1


def test_episodes_go_on_while_others_are_within_a_turn() -> None:
    """Row 0 says two tokens in its first turn; row 1, meanwhile, reads its answer and says its second action."""
    played = play(Script(num_turns=1), Script(num_turns=2), max_new_tokens=2, tokens={(1, 0): 30})
    assert played.sampler.histories == [[[1, 50], [1, 51]], [[1, 50, 30], [1, 51, 1001, 101]]]
    assert played.environments.calls == [[(1, [1001])], [(0, [30, 2000]), (1, [2001])]]
    assert played.sampler.uniforms == [[0.0, 1.0], [1 / 64, 1.125]]


def test_a_turn_that_the_sequence_cuts_is_truncated_with_an_answer_to_its_tokens() -> None:
    played = play(Script(num_turns=9), sequence_length=4, max_new_tokens=5, tokens={(1, 0): 30, (2, 0): 31})
    assert played.environments.calls == [[(0, [30, 31])]]
    (row,) = played.rows()
    assert row.tokens.tolist() == [1, 50, 30, 31]
    assert (row.turn_rewards.tolist(), row.termination) == ([1.0], Termination.TRUNCATED)


@pytest.mark.parametrize("form", ["trajectory", "step"])
def test_every_row_says_how_its_episode_went(form: RolloutForm) -> None:
    played = play(Script(num_turns=2), Script(num_turns=2, truncates=True), tokens={(1, 1): 30, (2, 1): 31})
    found = [
        (row.identity.env_id, {name: value if isinstance(value, str) else value.item()
                               for name, value in row.extras.items()})
        for row in played.rows(form)
    ]  # fmt: skip
    solved = {"success": True, "optimal_length": 4, "num_invalid_actions": 0, "layout_digest": "board0"}
    lost = {"success": False, "optimal_length": 5, "num_invalid_actions": 2, "layout_digest": "board1"}
    per_episode = 1 if form == "trajectory" else 2
    assert found == [(0, solved)] * per_episode + [(1, lost)] * per_episode
    dtypes = {name: value.dtype for name, value in played.rows(form)[0].extras.items() if name != "layout_digest"}
    assert dtypes == {"success": torch.bool, "optimal_length": torch.int32, "num_invalid_actions": torch.int32}


def test_a_row_per_turn_has_the_history_and_only_the_turns_own_tokens_sampled() -> None:
    played = play(Script(num_turns=2), max_new_tokens=2, tokens={(1, 0): 30})
    first, second = played.rows("step")
    assert (first.identity.turn, second.identity.turn) == (0, 1)
    assert first.tokens.tolist() == [1, 50, 30, 2000]
    assert second.tokens.tolist() == [1, 50, 30, 2000, 101, 3000]
    assert first.response_mask.tolist() == [False, False, True, True]
    assert second.response_mask.tolist() == [False] * 5 + [True]
    assert (first.rollout_logprobs.tolist(), second.rollout_logprobs.tolist()) == ([-1.0, -2.0], [-3.0])
    assert (first.turn_rewards.tolist(), second.turn_rewards.tolist()) == ([1.0], [2.0])
    assert (first.policy_versions.tolist(), second.policy_versions.tolist()) == ([3], [3])
    assert (first.prompt_length, second.prompt_length) == (2, 5)
    assert (first.termination, second.termination) == (Termination.TERMINATED, Termination.TERMINATED)


def test_a_batch_of_turns_counts_its_trajectories() -> None:
    played = play(Script(num_turns=2), Script(num_turns=3))
    batch = RolloutBatch.from_trajectories(played.rows("step"), sampling=SAMPLING, group_size=2)
    assert (len(batch), batch.num_trajectories, batch.num_groups) == (5, 2, 1)
    assert [identity.turn for identity in batch.identities] == [0, 1, 0, 1, 2]
    assert batch.rewards.tolist() == [1.0, 2.0, 1.0, 2.0, 3.0]
