"""FrozenLake as tokens: the fixed 4×4 map by hand, rewards and ends, random and held-out maps; the registry."""

from __future__ import annotations

import hashlib
import random

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from gymnasium.utils.env_checker import check_env

from mock_scheduler.config.base import ConfigSection
from mock_scheduler.errors import ConfigError
from pipelines.config.environments import CustomEnvConfig, EnvManagerConfig, FrozenLakeEnvConfig
from pipelines.config.model import ModelConfig
from pipelines.config.schema import PipelineConfig
from pipelines.config.training import TrainingConfig
from pipelines.environments.base import Split, TokenEnvironment
from pipelines.environments.frozen_lake import FrozenLakeEnv, draw_map, shortest_path
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.environments.kinds import ENVIRONMENT_KINDS, EnvironmentKind
from pipelines.environments.registry import build_environment, build_tokenizer
from pipelines.environments.seeds import environment_seed, is_held_out, split_of

LEFT, DOWN, RIGHT, UP = 2, 3, 4, 5
FIRST_QUERY = 6

# SFFF / FHFH / FFFH / HFFG with the player at the start: P___ / _O_O / ___O / O__G.
# Sixteen cells: the cell tokens start at 2 + 4 actions + 16 queries = 22, six glyphs (P _ O G X √) per cell.
START_BOARD = "P____O_O___OO__G"
START_TOKENS = [22, 29, 35, 41, 47, 54, 59, 66, 71, 77, 83, 90, 96, 101, 107, 115]


def make_environment(*, max_steps: int = 10, **settings: object) -> TokenEnvironment:
    env_config = FrozenLakeEnvConfig(**{"map_name": "4x4", "format_penalty": -0.1, **settings})
    config = CustomEnvConfig(max_steps=max_steps, env_config=env_config)
    run = PipelineConfig(exp_name="x", custom_envs={"FrozenLake": config})
    return build_environment(config, build_tokenizer(run))


def board_text(tokens: list[int], *, num_cells: int = 16) -> str:
    """The glyphs of an observation without its query."""
    tokenizer = GridTokenizer(num_cells=num_cells, glyphs="P_OGX√", actions=("Left", "Down", "Right", "Up"))
    return "".join(text.partition(":")[2] for text in tokenizer.decode(tokens[:-1]))


def test_the_first_prompt_of_the_fixed_map_is_known_token_by_token() -> None:
    assert make_environment().reset(0).observation == [1, *START_TOKENS, FIRST_QUERY]
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
    result = environment.step([RIGHT])
    assert board_text(result.observation) == "_P___O_O___OO__G"
    assert result.observation[-1] == FIRST_QUERY + 1
    assert (result.reward, result.terminated, result.truncated) == (0.0, False, False)


def test_a_hole_ends_the_episode_without_reward() -> None:
    environment = make_environment()
    environment.reset(0)
    environment.step([RIGHT])
    result = environment.step([DOWN])
    assert board_text(result.observation) == "_____X_O___OO__G"
    assert (result.reward, result.terminated, result.truncated) == (0.0, True, False)


def test_the_goal_ends_the_episode_with_reward_one() -> None:
    environment = make_environment()
    environment.reset(0)
    results = [environment.step([action]) for action in (DOWN, DOWN, RIGHT, DOWN, RIGHT, RIGHT)]
    assert [result.reward for result in results] == [0.0] * 5 + [1.0]
    assert [result.terminated for result in results] == [False] * 5 + [True]
    assert board_text(results[-1].observation) == "_____O_O___OO__√"


@pytest.mark.parametrize("token", [0, 1, FIRST_QUERY, 50])
def test_an_invalid_action_costs_the_penalty_and_moves_nothing(token: int) -> None:
    environment = make_environment()
    prompt = environment.reset(0).observation
    result = environment.step([token])
    assert result.observation == prompt[1:]
    assert (result.reward, result.terminated, result.truncated) == (-0.1, False, False)


def test_the_turn_limit_truncates_valid_and_invalid_turns() -> None:
    environment = make_environment(max_steps=2)
    environment.reset(0)
    assert [environment.step([token]).truncated for token in (LEFT, LEFT)] == [False, True]
    environment.reset(0)
    assert [environment.step([token]).truncated for token in (LEFT, 0)] == [False, True]


def test_the_goal_on_the_last_turn_is_terminated_and_not_truncated() -> None:
    environment = make_environment(max_steps=6)
    environment.reset(0)
    result = [environment.step([action]) for action in (DOWN, DOWN, RIGHT, DOWN, RIGHT, RIGHT)][-1]
    assert (result.terminated, result.truncated) == (True, False)


def test_the_same_seed_gives_the_same_slippery_episode() -> None:
    """Twelve moves on ice, where the outcome of each is random; other seeds end elsewhere."""

    def play(seed: int) -> list[tuple[list[int], float]]:
        environment = make_environment(is_slippery=True, max_steps=100)
        episode = [(environment.reset(seed).observation, 0.0)]
        for action in (RIGHT, UP, LEFT, UP) * 3:
            result = environment.step([action])
            episode.append((result.observation, result.reward))
            if result.terminated:
                break
        return episode

    assert play(3) == play(3)
    assert len({str(play(seed)) for seed in range(6)}) > 1


def test_a_reused_environment_forgets_its_last_episode() -> None:
    environment = make_environment(is_slippery=True)
    fresh = [environment.reset(5), environment.step([RIGHT])]
    environment.reset(6)
    environment.step([DOWN])
    assert [environment.reset(5), environment.step([RIGHT])] == fresh


def test_a_random_map_is_gymnasiums_for_the_episodes_seed() -> None:
    environment = make_environment(map_name=None, size=3, p=0.6)
    boards = []
    for seed in (1, 2, 3, 1):
        expected = "".join(generate_random_map(3, 0.6, seed=seed))
        plain = expected.replace("S", "P", 1).translate(str.maketrans({"F": "_", "H": "O"}))
        boards.append(board_text(environment.reset(seed).observation[1:], num_cells=9))
        assert boards[-1] == plain
    assert boards[0] == boards[3]
    assert len(set(boards)) > 1


def test_global_random_states_are_neither_read_nor_moved() -> None:
    environment = make_environment(map_name=None, size=4, is_slippery=True)
    random.seed(1)
    np.random.seed(1)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    first = [environment.reset(9), environment.step([RIGHT])]
    assert random.getstate() == python_state
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_state, strict=True))
    random.seed(2)
    np.random.seed(2)
    assert [environment.reset(9), environment.step([RIGHT])] == first


def test_step_before_reset_is_an_error() -> None:
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"^Cannot call env\.step\(\) before calling env\.reset\(\)$"):
        make_environment().step([LEFT])


def test_a_step_after_the_end_is_an_error() -> None:
    environment = make_environment(max_steps=1)
    environment.reset(0)
    environment.step([LEFT])
    with pytest.raises(RuntimeError, match=r"^step was called without an episode: reset the environment first$"):
        environment.step([LEFT])


def test_success_and_validity_are_told_apart_from_reward_and_end() -> None:
    environment = make_environment()
    environment.reset(0)
    results = [environment.step([token]) for token in (DOWN, 0, DOWN, RIGHT, DOWN, RIGHT, RIGHT)]
    assert [result.is_valid for result in results] == [True, False, True, True, True, True, True]
    assert [result.is_success for result in results] == [False] * 6 + [True]
    environment.reset(0)
    environment.step([RIGHT])
    hole = environment.step([DOWN])
    assert (hole.terminated, hole.is_success) == (True, False)


def test_the_start_names_the_board_and_its_shortest_way() -> None:
    """Six moves around the holes of the named map, counted by hand; on ice no number of moves is sure."""
    start = make_environment().reset(0)
    assert start.optimal_length == 6
    assert start.layout_digest == hashlib.sha256(START_BOARD.encode()).hexdigest()[:16]
    assert make_environment(is_slippery=True).reset(0).optimal_length == -1


@pytest.mark.parametrize(
    ("rows", "length"),
    [
        (["SG", "FF"], 1),
        (["SH", "FG"], 2),
        (["SHFF", "FHFF", "FHHF", "FFFG"], 6),
        (["SFF", "HHF", "GFF"], 6),
        (["SH", "HG"], -1),
    ],
)
def test_the_shortest_way_goes_around_holes(rows: list[str], length: int) -> None:
    assert shortest_path(rows) == length


def lake(**settings: object) -> FrozenLakeEnvConfig:
    return FrozenLakeEnvConfig(**{"map_name": None, "size": 4, "p": 0.8, "held_out_fraction": 0.25, **settings})


def test_training_and_validation_share_no_map_over_two_thousand_seeds() -> None:
    trained = {tuple(draw_map(lake(), split="train", seed=seed)) for seed in range(2000)}
    validated = {tuple(draw_map(lake(), split="held_out", seed=seed)) for seed in range(2000)}
    assert trained & validated == set()
    every = {tuple(generate_random_map(4, 0.8, seed=seed)) for seed in range(600)}
    held_out = sum(is_held_out(rows, 0.25) for rows in every) / len(every)
    assert held_out == pytest.approx(0.25, abs=0.06)  # three standard deviations of about 470 maps


def test_a_map_of_its_own_split_stays_that_of_its_seed() -> None:
    """Only maps of the other split are drawn again, from seeds that follow from the episode's."""
    kept = 0
    for seed in range(200):
        rows = generate_random_map(4, 0.8, seed=seed)
        drawn = draw_map(lake(), split="train", seed=seed)
        assert (drawn == rows) is not is_held_out(rows, 0.25)
        assert drawn == draw_map(lake(), split="train", seed=seed)
        kept += drawn == rows
    assert 120 < kept < 180


def test_whether_a_map_is_held_out_follows_from_its_digest() -> None:
    """The SHA-256 of ``SF``, line break, ``FG`` begins with 2ada50b7: it is at 0.16739 of all digests."""
    assert hashlib.sha256(b"SF\nFG").hexdigest()[:8] == "2ada50b7"
    assert [is_held_out(["SF", "FG"], fraction) for fraction in (0.0, 0.16739, 0.1674)] == [False, False, True]


def test_with_no_fraction_held_out_every_split_plays_gymnasiums_map() -> None:
    settings = lake(held_out_fraction=0.0)
    assert draw_map(settings, split="train", seed=7) == generate_random_map(4, 0.8, seed=7)


def test_a_split_without_a_map_is_refused_with_the_settings() -> None:
    """With every cell frozen there is one map, which is in one of the two splits."""
    empty: Split = "train" if is_held_out(["SF", "FG"], 0.5) else "held_out"
    with pytest.raises(ConfigError) as caught:
        draw_map(lake(size=2, p=1.0, held_out_fraction=0.5), split=empty, seed=0)
    assert str(caught.value) == (
        f"frozen_lake: none of 60 random maps of size 2 and p 1.0 is in the split '{empty}' with held_out_fraction "
        "0.5: set a larger size, another p, or another held_out_fraction"
    )


def test_a_split_that_the_settings_do_not_make_is_refused() -> None:
    config = CustomEnvConfig(env_config=lake(held_out_fraction=0.0))
    tokenizer = build_tokenizer(PipelineConfig(exp_name="x", custom_envs={"FrozenLake": config}))
    with pytest.raises(ConfigError) as caught:
        build_environment(config, tokenizer, split="held_out")
    assert str(caught.value) == (
        "the held-out layouts were asked for, but held_out_fraction is 0.0: set it above 0 to hold some out"
    )


def test_validation_plays_held_out_layouts_where_there_are_any() -> None:
    assert split_of(CustomEnvConfig(env_config=lake()), "train") == "train"
    assert split_of(CustomEnvConfig(env_config=lake()), "val") == "held_out"
    assert split_of(CustomEnvConfig(env_config=lake(held_out_fraction=0.0)), "val") == "all"


def test_an_episodes_seed_is_that_of_its_group() -> None:
    """Pinned: a recording is replayed with these seeds."""
    seeds = [
        environment_seed(42, tag="FrozenLake", mode=mode, scheduler_id="default", group_id=group, episode_id=3)
        for mode in ("train", "val")
        for group in (0, 1)
    ]
    expected = [
        int.from_bytes(hashlib.sha256(f"42/environment/FrozenLake/{name}/3".encode()).digest()[:4], "little") >> 1
        for name in ("train/default/0", "train/default/1", "val/default/0", "val/default/1")
    ]
    assert seeds == expected


@pytest.mark.parametrize("kind", ENVIRONMENT_KINDS.values(), ids=ENVIRONMENT_KINDS)
def test_every_environment_passes_gymnasiums_own_check(kind: EnvironmentKind) -> None:
    env = gymnasium.make(f"pipelines.environments.gymnasium_ids:{kind.gymnasium_id}", max_steps=5)
    check_env(env.unwrapped)
    board, info = env.reset(seed=3)
    assert env.reset(seed=3) == (board, info)
    assert sum(glyph in kind.player_glyphs for glyph in board) == 1
    assert set(board) <= set(kind.glyphs)


def test_gymnasiums_own_seed_draws_another_board_each_time() -> None:
    env = FrozenLakeEnv(settings=lake(held_out_fraction=0.0))
    env.reset(seed=1)
    assert len({env.reset()[0] for _ in range(8)}) > 1
    with pytest.raises(ValueError, match=r"^action 5 is not in 0 to 4$"):
        env.step(5)


def test_a_tokenizer_of_other_boards_is_refused() -> None:
    tokenizer = GridTokenizer(num_cells=9, glyphs="P_OGX√", actions=("Left", "Down", "Right", "Up"))
    with pytest.raises(
        ValueError, match=r"^the tokenizer has 69 tokens of other boards or actions than frozen_lake's 118$"
    ):
        build_environment(CustomEnvConfig(), tokenizer)


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


def test_a_first_prompt_that_leaves_no_room_for_an_action_is_refused() -> None:
    training = TrainingConfig(sequence_multiple_of=1)
    with pytest.raises(ConfigError) as caught:
        build_tokenizer(PipelineConfig(exp_name="x", sequence_length=18, training=training))
    assert str(caught.value) == (
        "sequence_length 18 leaves no room for an action after the first prompt of 18 tokens (16 cells, the token that "
        "opens an episode and the query); set sequence_length to at least 19, or use a smaller board"
    )
    assert build_tokenizer(PipelineConfig(exp_name="x", sequence_length=19, training=training)).num_cells == 16
