"""The tasks of reasoning-gym, with its own verifiers, as text environments; loads the package where it is used.

A question follows from dataset, settings and seed alone: every episode makes a dataset of one item with a seed of its
own. So questions and rewards are the same in any process and whatever was asked before.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import canonical_json
from mock_scheduler.support.text import bullet_list
from pipelines.config.environments import CustomEnvConfig, ReasoningGymEnvConfig
from pipelines.environments.base import Split
from pipelines.environments.seeds import check_split, derive_seed, is_in_split, max_draws
from pipelines.environments.text_tokens import Message, TextAnswer

RETRY = "That is not the right answer. Try again."

_OWN_KEYS = ("seed", "size")


def _load() -> Any:  # noqa: ANN401 - the package has no annotations of use
    try:
        from reasoning_gym import factory
    except ImportError as error:
        raise ConfigError(
            f"env_type reasoning_gym needs the package reasoning-gym, and it cannot be imported ({error}): pip install "
            "'mock-scheduler[text]'"
        ) from error
    return factory


class _Questions:
    """Questions of one dataset with one set of settings, each by its seed."""

    def __init__(self, name: str, settings: str) -> None:
        self._name, self._settings = name, json.loads(settings)
        # Some tasks read a file of words when they are made. Most take their seed anew for each question.
        self._made = self._make(_PROBES[0])
        self._takes_seed = all(self._seeded(seed)[0] == self._make(seed)[0] for seed in _PROBES)

    def ask(self, seed: int) -> Any:  # noqa: ANN401
        """Makes the dataset whose first item is the question of a seed."""
        return self._seeded(seed) if self._takes_seed else self._make(seed)

    def _make(self, seed: int) -> Any:  # noqa: ANN401
        return _load().create_dataset(self._name, seed=seed, size=1, **self._settings)

    def _seeded(self, seed: int) -> Any:  # noqa: ANN401
        dataset = copy.copy(self._made)
        dataset.seed = seed
        return dataset


_PROBES = (11, 5_000_011, 2_000_000_011)
_questions = lru_cache(_Questions)


class ReasoningGymEnv:
    """Asks one question for each episode; ``max_steps`` answers may be tried, until one is right.

    The rewards of an episode add up to the score of its last answer: each turn pays the change.
    """

    def __init__(self, settings: ReasoningGymEnvConfig, *, max_steps: int, split: Split) -> None:
        check_split(split, settings.held_out_fraction)
        _load()
        self._settings = settings
        self._max_steps = max_steps
        self._split = split
        self._dataset: Any = None
        self._entry: Any = None
        self._turn = 0
        self._score = 0.0

    def reset(self, seed: int) -> list[Message]:
        """Draws the question of ``seed`` or, where the split may not ask it, of seeds derived from it.

        Raises:
            ConfigError: none of the questions drawn is in the split.
        """
        settings = self._settings
        questions = _questions(settings.dataset, canonical_json(settings.dataset_config))
        num_draws = max_draws(self._split, settings.held_out_fraction)
        for draw in range(num_draws):
            drawn = seed if draw == 0 else derive_seed(seed, "question", draw)
            self._dataset = questions.ask(drawn)
            self._entry = self._dataset[0]
            if is_in_split([self._entry["question"]], self._split, settings.held_out_fraction):
                break
        else:
            raise ConfigError(
                f"reasoning_gym: none of {num_draws} questions of {settings.dataset} is in the split '{self._split}' "
                f"with held_out_fraction {settings.held_out_fraction}: choose settings with more questions, or another "
                "fraction"
            )
        self._turn, self._score = 0, 0.0
        messages: list[Message] = [{"role": "user", "content": self._entry["question"]}]
        if settings.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": settings.system_prompt})
        return messages

    def answer(self, text: str) -> TextAnswer:
        """Lets the dataset's verifier score an answer; one on which it fails is wrong."""
        try:
            score = float(self._dataset.score_answer(self._extract(text), self._entry))
        except Exception:  # noqa: BLE001 - verifiers parse whatever a policy wrote, and some raise where they cannot
            score = 0.0
        change, self._score = score - self._score, score
        self._turn += 1
        is_success = score >= 1.0
        is_over = is_success or self._turn >= self._max_steps
        return TextAnswer(reward=change, is_success=is_success, reply=None if is_over else RETRY)

    def own_answer(self) -> str | None:
        """Returns the answer of the dataset's entry, in the tag where there is one."""
        answer, tag = self._entry["answer"], self._settings.answer_tag
        if answer is None:
            return None
        return str(answer) if tag is None else f"<{tag}>{answer}</{tag}>"

    def _extract(self, text: str) -> str | None:
        tag = self._settings.answer_tag
        if tag is None:
            return text.strip()
        found = re.findall(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, flags=re.DOTALL)
        return found[-1].strip() if found else None


def check_reasoning(envs: Mapping[str, CustomEnvConfig]) -> None:
    """Makes a question of every tag.

    Raises:
        ConfigError: with everything that reasoning-gym does not know or refuses.
    """
    settings_of = {
        tag: env.env_config for tag, env in envs.items() if isinstance(env.env_config, ReasoningGymEnvConfig)
    }
    if not settings_of:
        return
    factory = _load()
    problems = [
        f"custom_envs.{tag}.env_config.{problem}"
        for tag, settings in settings_of.items()
        for problem in _problems_of(factory, settings)
    ]
    if problems:
        raise ConfigError(f"reasoning-gym cannot ask these:{bullet_list(problems, limit=None)}")


def _problems_of(factory: Any, settings: ReasoningGymEnvConfig) -> list[str]:  # noqa: ANN401
    name, given = settings.dataset, settings.dataset_config
    if name not in factory.DATASETS:
        return [f"dataset: '{name}' is unknown{_nearest(name, factory.DATASETS)}"]
    _, config_class = factory.DATASETS[name]
    known = sorted({field.name for field in dataclasses.fields(config_class)} - set(_OWN_KEYS))
    problems = []
    for key in given:
        if key in _OWN_KEYS:
            problems.append(f"dataset_config.{key}: follows from the run's seed and batch size; leave it out")
        elif key not in known:
            problems.append(f"dataset_config.{key}: {name} has {', '.join(known)}{_nearest(key, known)}")
    if problems:
        return problems
    try:
        factory.create_dataset(name, seed=0, size=1, **given)[0]
    except Exception as error:  # noqa: BLE001 - whatever 106 datasets raise about their settings
        return [f"dataset_config: {name} refuses {given}: {type(error).__name__}: {error}"]
    return []


def _nearest(word: str, known: Any) -> str:  # noqa: ANN401 - any words
    near = get_close_matches(word, list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
