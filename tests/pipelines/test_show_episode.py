"""A recorded episode as a person reads it."""

from __future__ import annotations

import math

import pytest

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import ConfigError
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.show_episode import describe_episode
from tests.recording.builders import SAMPLING, make_row

TOKENIZER = GridTokenizer(num_cells=4, glyphs="P_OGX√", actions=("Left", "Down", "Right", "Up"))


def make_episode() -> RolloutBatch:
    """On the 2×2 map P_ / _G: right with probability 1/2, then down with 1/4, which wins."""
    first, second, right, down = "P__G", "_P_G", 4, 3
    tokens = [1, *TOKENIZER.encode_board(first, 0), right, *TOKENIZER.encode_board(second, 1), down]
    row = make_row(
        tokens=tokens,
        response=[token in (right, down) for token in tokens],
        rollout_logprobs=(math.log(0.5), math.log(0.25)),
        turn_rewards=(0.0, 1.0),
        prompt_length=6,
    )
    return RolloutBatch.from_trajectories([row], sampling=SAMPLING, group_size=1)


def test_boards_actions_probabilities_and_rewards_are_shown_turn_by_turn() -> None:
    assert list(describe_episode(make_episode(), 0, TOKENIZER)) == [
        "default/group 0/episode 0/env 0/turn 0  FrozenLake",
        "  P _",
        "  _ G",
        "    -> Right  (probability 0.50, reward 0)",
        "  _ P",
        "  _ G",
        "    -> Down  (probability 0.25, reward 1)",
        "  terminated, total reward 1",
    ]


def test_a_row_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"^row 1 is not in this step; it has rows 0 to 0$"):
        list(describe_episode(make_episode(), 1, TOKENIZER))
