"""reasoning-gym's tasks: reproducible questions, rewards of the verifier, held-out questions, and wrong settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from launch import make_tiny_qwen3
from mock_scheduler.errors import ConfigError
from pipelines.config.environments import CustomEnvConfig, ReasoningGymEnvConfig
from pipelines.environments import text_tokens
from pipelines.environments.base import ResetRequest
from pipelines.environments.reasoning import RETRY, ReasoningGymEnv, check_reasoning
from pipelines.environments.text_tokens import find_tokenizer
from pipelines.environments.workers import EnvironmentPool

PACKAGES = Path(__file__).parents[2] / "text_packages"
SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins are on the path, in this process and in workers."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    for name in ("transformers", "reasoning_gym", "reasoning_gym.factory"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    text_tokens._load.cache_clear()


def settings(**values: Any) -> ReasoningGymEnvConfig:
    return ReasoningGymEnvConfig(**{"dataset": "chain_sum", "dataset_config": SMALL, **values})


def env_config(**values: Any) -> CustomEnvConfig:
    return CustomEnvConfig.model_validate(
        {"env_type": "reasoning_gym", "env_config": {"dataset": "chain_sum", **values}}
    )


def ask(seed: int, *, max_steps: int = 1, split: Any = "train", **values: Any) -> tuple[ReasoningGymEnv, str, int]:
    """The environment, its question and the right answer."""
    environment = ReasoningGymEnv(settings(**values), max_steps=max_steps, split=split)
    question = environment.reset(seed)[-1]["content"]
    return environment, question, sum(int(term) for term in question.removesuffix(" =").split(" + "))


def test_a_seed_gives_the_same_question_whatever_was_asked_before() -> None:
    environment, question, _ = ask(5)
    environment.reset(6)
    assert environment.reset(5)[-1]["content"] == question
    assert len({ask(seed)[1] for seed in range(40)}) > 20


def test_the_verifier_gives_the_reward() -> None:
    environment, _, right = ask(5)
    answer = environment.answer(f" {right}\n")
    assert (answer.reward, answer.is_success, answer.reply) == (1.0, True, None)
    environment, _, right = ask(5)
    part = environment.answer(f"{right}{'.' * (4 - len(str(right)))}")
    assert (part.reward, part.is_success, part.reply) == (len(str(right)) / 4, False, None)


def test_the_rewards_of_several_tries_add_up_to_the_last_ones_score() -> None:
    environment, _, right = ask(5, max_steps=3)
    padded = f"{right}{'.' * (4 - len(str(right)))}"
    answers = [environment.answer(text) for text in (padded, "x", str(right))]
    share = len(str(right)) / 4
    assert [answer.reward for answer in answers] == [share, -share, 1.0]
    assert [answer.reply for answer in answers] == [RETRY, RETRY, None]
    environment.reset(6)
    assert environment.answer("x").reply == RETRY  # a new episode has its tries again


def test_an_answer_on_which_the_verifier_fails_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    environment, _, right = ask(5, max_steps=2)
    monkeypatch.setattr(environment._dataset, "score_answer", lambda answer, entry: int("no number"))
    assert environment.answer(str(right)).reward == 0.0


def test_an_answer_stands_between_tags() -> None:
    environment, _, right = ask(5, answer_tag="answer", max_steps=2)
    assert environment.answer(str(right)).reward == 0.0
    assert environment.answer(f"is <answer>1</answer> no <answer>\n{right} </answer>.").reward == 1.0


def test_a_system_prompt_stands_first() -> None:
    messages = ask(5, system_prompt="Be brief.")[0].reset(5)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"] == "Be brief."


def test_no_question_of_training_is_asked_in_validation() -> None:
    """81 sums are so few that their seeds alone would part nothing."""
    trained = {ask(seed, held_out_fraction=0.3)[1] for seed in range(400)}
    validated = {ask(seed, split="held_out", held_out_fraction=0.3)[1] for seed in range(400)}
    assert not trained & validated
    assert (len(trained) + len(validated), len(validated) > 10) == (81, True)


def test_a_split_without_questions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"held_out_fraction is 0.0: set it above 0"):
        ask(1, split="held_out", held_out_fraction=0.0)
    nine = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    with pytest.raises(ConfigError, match=r"none of 30000 questions of chain_sum is in the split 'held_out'"):
        ask(1, split="held_out", held_out_fraction=0.001, dataset_config=nine)


def test_all_wrong_settings_are_named_at_once() -> None:
    envs = {
        "Typo": env_config(dataset="chain_sums"),
        "Key": env_config(dataset_config={"min_term": 2, "seed": 3}),
        "Value": env_config(dataset_config={"min_terms": 0}),
        "Right": env_config(dataset_config=SMALL),
    }
    with pytest.raises(ConfigError) as caught:
        check_reasoning(envs)
    assert str(caught.value).splitlines() == [
        "reasoning-gym cannot ask these:",
        "  - custom_envs.Typo.env_config.dataset: 'chain_sums' is unknown; did you mean chain_sum?",
        "  - custom_envs.Key.env_config.dataset_config.min_term: chain_sum has max_digits, max_terms, min_digits, "
        "min_terms; did you mean min_terms or max_terms?",
        "  - custom_envs.Key.env_config.dataset_config.seed: follows from the run's seed and batch size; leave it out",
        "  - custom_envs.Value.env_config.dataset_config: chain_sum refuses {'min_terms': 0}: AssertionError: "
        "min_terms must be positive",
    ]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"needs the package reasoning-gym.*: pip install 'mock-scheduler\[text\]'"):
        check_reasoning({"Sums": env_config()})


def test_questions_and_rewards_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    make_tiny_qwen3.write(tmp_path / "tiny", num_layers=1, hidden=64)
    tokenizer = find_tokenizer(str(tmp_path / "tiny"), vocab_size=259, on_break="end")
    envs = {"Sums": env_config(dataset_config=SMALL).model_copy(update={"max_steps": 2})}
    requests = [ResetRequest(slot=slot, tag="Sums", seed=90 + slot, split="train") for slot in range(5)]
    played = []
    for num_workers in (0, 1, 3):
        pool = EnvironmentPool(envs, tokenizer, num_workers=num_workers)
        starts = pool.reset_many(requests)
        answers = [pool.step_many([(slot, [20 + slot + turn, 2]) for slot in range(5)]) for turn in range(2)]
        pool.close()
        played.append((starts, answers))
    assert played[0] == played[1] == played[2]
    assert {answer.is_valid for answer in played[0][1][0]} == {True}
    assert len({start.layout_digest for start in played[0][0]}) == 5
