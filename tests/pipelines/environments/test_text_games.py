"""Games in text: an episode follows from its seed, held-out ones are never trained, and what cannot be played."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import make_tiny_qwen3
from mock_scheduler.errors import ConfigError
from pipelines.config.environments import CustomEnvConfig
from pipelines.environments import text_games, text_tokens
from pipelines.environments.base import ResetRequest
from pipelines.environments.text_games import GameEnv, check_games
from pipelines.environments.text_tokens import find_tokenizer
from pipelines.environments.workers import EnvironmentPool

PACKAGES = Path(__file__).parents[2] / "text_packages"
ECHO = {"env_id": "spoken:Echo-v0"}


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins are on the path, in this process and in workers."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    for name in ("transformers", "textarena", "textarena.envs", "textarena.envs.registration", "nltk"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    text_tokens._load.cache_clear()
    text_games._shows_start.cache_clear()


def env_config(env_type: str = "textarena", max_steps: int = 4, **values: Any) -> CustomEnvConfig:
    values = values or {"game": "Guess-v0"}
    return CustomEnvConfig.model_validate({"env_type": env_type, "max_steps": max_steps, "env_config": values})


def build(env_type: str = "textarena", *, max_steps: int = 4, split: Any = "train", **values: Any) -> GameEnv:
    settings: Any = env_config(env_type, **values).env_config
    return GameEnv(settings, max_steps=max_steps, split=split)


def guess(said: str) -> str:
    """The number that a text of the game ends with, in brackets."""
    return f"[{said.rstrip('.').rpartition(' ')[2]}]"


def test_a_game_is_played_to_its_reward_and_the_players_own_texts_are_not_said_again() -> None:
    environment = build()
    assert environment.reset(3) == [{"role": "user", "content": "Guess a number up to 20."}]
    answer = environment.answer("[0]")
    assert answer.reply is not None
    assert answer.reply.startswith("No; now it is ")
    assert "[0]" not in answer.reply
    won = environment.answer(guess(answer.reply))
    assert (won.reward, won.is_success, won.reply, won.is_cut) == (1.0, True, None, False)


def test_games_that_draw_from_the_process_generators_do_not_disturb_each_other() -> None:
    """The stand-in draws anew in every turn: what the number becomes must not depend on other games or on the run."""

    def play(environment: GameEnv, others: list[GameEnv]) -> list[str | None]:
        environment.reset(3)
        said = []
        for turn in range(3):
            for other in others:
                other.reset(turn)
            random.random()
            said.append(environment.answer("[0]").reply)
        return said

    random.seed(1)
    np.random.seed(1)
    outer = random.getstate(), np.random.get_state()[2]
    alone = play(build(), [])
    assert np.random.get_state()[2] == outer[1]
    random.seed(5)
    assert play(build(), [build(), build()]) == alone
    assert len(set(alone)) > 1


def test_the_generators_of_the_process_are_left_as_they_were() -> None:
    environment = build()
    before = random.getstate()
    environment.reset(3)
    environment.answer("[0]")
    assert random.getstate() == before


def test_a_game_out_of_turns_or_that_fails_on_a_text_is_cut_without_a_reward() -> None:
    environment = build(max_steps=1)
    environment.reset(3)
    cut = environment.answer("[0]")
    assert (cut.reward, cut.reply, cut.is_cut) == (0.0, None, True)
    environment = build()
    environment.reset(3)
    failed = environment.answer("no number")
    assert (failed.reward, failed.is_success, failed.reply, failed.is_cut) == (0.0, False, None, True)


def test_episodes_are_held_out_by_their_first_text_or_by_their_seed_where_it_never_differs() -> None:
    shown = {"game": "Open-v0", "held_out_fraction": 0.4}
    texts = {}
    for split in ("train", "held_out"):
        environment = build(split=split, **shown)
        texts[split] = {environment.reset(seed)[0]["content"] for seed in range(60)}
    assert texts["train"].isdisjoint(texts["held_out"])
    assert len(texts["train"] | texts["held_out"]) == 20
    # The first text is always the same here: the held-out seed of an episode is another one than the trained.
    replies = {split: build(split=split, game="Guess-v0", held_out_fraction=0.5) for split in texts}
    drawn = {}
    for split, environment in replies.items():
        drawn[split] = []
        for seed in range(20):
            environment.reset(seed)
            drawn[split].append(environment.answer("[0]").reply)
    assert drawn["train"] != drawn["held_out"]


def test_an_environment_of_gymnasium_that_speaks_text_is_played() -> None:
    environment = build("gymnasium_text", **ECHO, env_kwargs={"prefix": "repeat"}, system_prompt="Be brief.")
    first = environment.reset(3)
    assert [message["role"] for message in first] == ["system", "user"]
    word = first[1]["content"].removeprefix("repeat ")
    np.random.seed(9)
    assert environment.reset(3) == first
    assert environment.answer("?").reply == "again"
    right = environment.answer(word)
    assert (right.reward, right.is_success, right.reply, right.is_cut) == (1.0, True, None, False)
    environment.reset(3)
    turns = [environment.answer("?") for _ in range(3)]
    assert (turns[-1].reward, turns[-1].reply, turns[-1].is_cut) == (0.0, None, True)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_turns_are_tokens_in_and_tokens_out_in_any_process(num_workers: int, tmp_path: Path) -> None:
    """The prompt of the second turn begins with all tokens of the first; a token that is no end cuts the turn."""
    make_tiny_qwen3.write(tmp_path / "tiny", num_layers=1, hidden=64)
    tokenizer = find_tokenizer(str(tmp_path / "tiny"), vocab_size=259, on_break="error")
    loaded = tokenizer.load()
    pool = EnvironmentPool({"Game": env_config(**ECHO, env_type="gymnasium_text")}, tokenizer, num_workers=num_workers)
    try:
        requests = [ResetRequest(slot=slot, tag="Game", seed=slot, split="train") for slot in range(3)]
        started = pool.reset_many(requests)
        words = [loaded.decode(start.observation).partition("say ")[2].partition("<")[0] for start in started]
        wrong = pool.step_many([(slot, [*loaded.tokenizer.encode("?"), 2]) for slot in range(3)])  # type: ignore[attr-defined]
        assert all("again" in loaded.decode(result.observation) for result in wrong)
        right = pool.step_many([(slot, [*loaded.tokenizer.encode(words[slot]), 2]) for slot in range(3)])  # type: ignore[attr-defined]
        assert [(result.reward, result.terminated, result.is_success) for result in right] == [(1.0, True, True)] * 3
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("env_type", "values", "expected"),
    [
        ("textarena", {"game": "Gues-v0"}, "game: textarena has no 'Gues-v0'; did you mean Guess-v0"),
        ("textarena", {"game": "Words-v0"}, "needs word lists of NLTK that are not here, and nothing is downloaded"),
        ("textarena", {"game": "Pair-v0"}, "'Pair-v0' cannot be played by one player with these settings"),
        ("textarena", {"game": "Guess-v0", "game_config": {"least": 1}}, "unexpected keyword argument 'least'"),
        ("gymnasium_text", {"env_id": "Nowhere-v0"}, "gymnasium cannot make 'Nowhere-v0': NameNotFound"),
        ("gymnasium_text", {"env_id": "FrozenLake-v1"}, "does not speak text: observation_space is Discrete(16)"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_before_the_run(
    env_type: str, values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_games({"A": env_config(env_type, **values), "Good": env_config()})
    assert expected in str(refused.value)
    assert "custom_envs.A.env_config." in str(refused.value)
    assert "Good" not in str(refused.value)


def test_a_game_without_the_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigError, match=r"needs the package textarena.*pip install 'mock-scheduler\[text\]'"):
        check_games({"A": env_config()})
