"""FrozenLake as tokens: the fixed 4×4 map by hand, rewards and ends, random maps by seed."""

from __future__ import annotations

import random

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from mock_scheduler.config.schema import (
    ConfigSection,
    CustomEnvConfig,
    EnvManagerConfig,
    FrozenLakeEnvConfig,
    ModelConfig,
    PipelineConfig,
)
from mock_scheduler.errors import ConfigError
from pipelines.environments.frozen_lake import FrozenLakeEnvironment
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.environments.registry import build_environment, build_tokenizer

LEFT, DOWN, RIGHT, UP = 2, 3, 4, 5
FIRST_QUERY = 6

# SFFF / FHFH / FFFH / HFFG with the player at the start: P___ / _O_O / ___O / O__G.
# Sixteen cells: the cell tokens start at 2 + 4 actions + 16 queries = 22, six glyphs (P _ O G X √) per cell.
START_BOARD = "P____O_O___OO__G"
START_TOKENS = [22, 29, 35, 41, 47, 54, 59, 66, 71, 77, 83, 90, 96, 101, 107, 115]


def make_environment(*, max_steps: int = 10, **settings: object) -> FrozenLakeEnvironment:
    env_config = FrozenLakeEnvConfig(**{"map_name": "4x4", "format_penalty": -0.1, **settings})
    config = CustomEnvConfig(max_steps=max_steps, env_config=env_config)
    run = PipelineConfig(exp_name="x", custom_envs={"FrozenLake": config})
    environment = build_environment(config, build_tokenizer(run))
    assert isinstance(environment, FrozenLakeEnvironment)
    return environment


def board_text(tokens: list[int], *, num_cells: int = 16) -> str:
    """The glyphs of an observation without its query."""
    tokenizer = GridTokenizer(num_cells=num_cells, glyphs="P_OGX√", actions=("Left", "Down", "Right", "Up"))
    return "".join(text.partition(":")[2] for text in tokenizer.decode(tokens[:-1]))


def test_the_first_prompt_of_the_fixed_map_is_known_token_by_token() -> None:
    assert make_environment().reset(0) == [1, *START_TOKENS, FIRST_QUERY]
    assert board_text([*START_TOKENS, FIRST_QUERY]) == START_BOARD


def test_the_vocabulary_is_the_list_of_its_tokens() -> None:
    tokenizer = build_tokenizer(PipelineConfig(exp_name="x"))
    assert tokenizer.vocab_size == len(tokenizer.vocabulary) == 2 + 4 + 16 + 16 * 6
    assert tokenizer.decode([0, 1, *tokenizer.action_ids]) == ["<pad>", "<bos>", "Left", "Down", "Right", "Up"]
    assert tokenizer.decode([6, 21, 22, 117]) == ["<act@0>", "<act@15>", "0:P", "15:√"]
    assert [tokenizer.action_of(token) for token in (1, 2, 5, 6)] == [None, 0, 3, None]


def test_vocabularies_differ_in_digest_where_one_token_differs() -> None:
    one = GridTokenizer(num_cells=4, glyphs="P_", actions=("Left",))
    other = GridTokenizer(num_cells=4, glyphs="P-", actions=("Left",))
    assert one.digest() == GridTokenizer(num_cells=4, glyphs="P_", actions=("Left",)).digest()
    assert one.digest() != other.digest()


def test_a_move_gives_the_next_board_without_bos_and_the_players_query() -> None:
    environment = make_environment()
    environment.reset(0)
    result = environment.step(RIGHT)
    assert board_text(result.observation) == "_P___O_O___OO__G"
    assert result.observation[-1] == FIRST_QUERY + 1
    assert (result.reward, result.terminated, result.truncated) == (0.0, False, False)


def test_a_hole_ends_the_episode_without_reward() -> None:
    environment = make_environment()
    environment.reset(0)
    environment.step(RIGHT)
    result = environment.step(DOWN)
    assert board_text(result.observation) == "_____X_O___OO__G"
    assert (result.reward, result.terminated, result.truncated) == (0.0, True, False)


def test_the_goal_ends_the_episode_with_reward_one() -> None:
    environment = make_environment()
    environment.reset(0)
    results = [environment.step(action) for action in (DOWN, DOWN, RIGHT, DOWN, RIGHT, RIGHT)]
    assert [result.reward for result in results] == [0.0] * 5 + [1.0]
    assert [result.terminated for result in results] == [False] * 5 + [True]
    assert board_text(results[-1].observation) == "_____O_O___OO__√"


@pytest.mark.parametrize("token", [0, 1, FIRST_QUERY, 50])
def test_an_invalid_action_costs_the_penalty_and_moves_nothing(token: int) -> None:
    environment = make_environment()
    prompt = environment.reset(0)
    result = environment.step(token)
    assert result.observation == prompt[1:]
    assert (result.reward, result.terminated, result.truncated) == (-0.1, False, False)


def test_the_turn_limit_truncates_valid_and_invalid_turns() -> None:
    environment = make_environment(max_steps=2)
    environment.reset(0)
    assert [environment.step(token).truncated for token in (LEFT, LEFT)] == [False, True]
    environment.reset(0)
    assert [environment.step(token).truncated for token in (LEFT, 0)] == [False, True]


def test_the_goal_on_the_last_turn_is_terminated_and_not_truncated() -> None:
    environment = make_environment(max_steps=6)
    environment.reset(0)
    result = [environment.step(action) for action in (DOWN, DOWN, RIGHT, DOWN, RIGHT, RIGHT)][-1]
    assert (result.terminated, result.truncated) == (True, False)


def test_the_same_seed_gives_the_same_slippery_episode() -> None:
    """Twelve moves on ice, where the outcome of each is random; other seeds end elsewhere."""

    def play(seed: int) -> list[tuple[list[int], float]]:
        environment = make_environment(is_slippery=True, max_steps=100)
        episode = [(environment.reset(seed), 0.0)]
        for action in (RIGHT, UP, LEFT, UP) * 3:
            result = environment.step(action)
            episode.append((result.observation, result.reward))
            if result.terminated:
                break
        return episode

    assert play(3) == play(3)
    assert len({str(play(seed)) for seed in range(6)}) > 1


def test_a_reused_environment_forgets_its_last_episode() -> None:
    environment = make_environment(is_slippery=True)
    fresh = [environment.reset(5), environment.step(RIGHT)]
    environment.reset(6)
    environment.step(DOWN)
    assert [environment.reset(5), environment.step(RIGHT)] == fresh


def test_a_random_map_is_gymnasiums_for_the_episodes_seed() -> None:
    environment = make_environment(map_name=None, size=3, p=0.6)
    boards = []
    for seed in (1, 2, 3, 1):
        expected = "".join(generate_random_map(3, 0.6, seed=seed))
        plain = expected.replace("S", "P", 1).translate(str.maketrans({"F": "_", "H": "O"}))
        boards.append(board_text(environment.reset(seed)[1:], num_cells=9))
        assert boards[-1] == plain
    assert boards[0] == boards[3]
    assert len(set(boards)) > 1


def test_global_random_states_are_neither_read_nor_moved() -> None:
    environment = make_environment(map_name=None, size=4, is_slippery=True)
    random.seed(1)
    np.random.seed(1)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    first = [environment.reset(9), environment.step(RIGHT)]
    assert random.getstate() == python_state
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_state, strict=True))
    random.seed(2)
    np.random.seed(2)
    assert [environment.reset(9), environment.step(RIGHT)] == first


def test_step_before_reset_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"^FrozenLakeEnvironment\.step was called before reset$"):
        make_environment().step(LEFT)


def environments(**sizes: int) -> dict[str, CustomEnvConfig]:
    return {
        tag: CustomEnvConfig(env_config=FrozenLakeEnvConfig(map_name=None, size=size)) for tag, size in sizes.items()
    }


def config_with(**sections: ConfigSection | dict[str, CustomEnvConfig]) -> PipelineConfig:
    return PipelineConfig(exp_name="x", **sections)


def test_environments_of_one_run_must_share_a_vocabulary() -> None:
    config = config_with(
        custom_envs=environments(Large=4, Small=3),
        train_env_manager=EnvManagerConfig(tags=["Large"]),
        val_env_manager=EnvManagerConfig(tags=["Small"]),
    )
    with pytest.raises(ConfigError) as caught:
        build_tokenizer(config)
    assert str(caught.value) == (
        "custom_envs of one run must share a vocabulary, but these differ: Large: 118 tokens, Small: 69 tokens"
    )


def test_a_model_vocabulary_below_the_environments_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build_tokenizer(config_with(model=ModelConfig(vocab_size=100)))
    assert str(caught.value) == (
        "model.vocab_size 100 is smaller than the environment's vocabulary of 118 tokens; set it to at least that, "
        "or leave it out to take the vocabulary's size"
    )
