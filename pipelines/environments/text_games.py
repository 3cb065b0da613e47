"""Games of others are played in text over several turns: textarena's, and environments of gymnasium that speak text.

Their packages are loaded where a game is opened. A game's moves follow from its seed and from the texts it was given:
while it plays, Python's and NumPy's generators of the process are its own, seeded anew for each episode, since many
games draw from them. Nothing is downloaded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Protocol

import numpy as np

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.text import bullet_list
from pipelines.config.environments import CustomEnvConfig, GymnasiumTextEnvConfig, TextArenaEnvConfig
from pipelines.environments.base import Split
from pipelines.environments.seeds import check_split, derive_seed, is_in_split, max_draws
from pipelines.environments.text_tokens import Message, TextAnswer

_PLAYER = 0
# Beginnings that are looked at to learn whether a game shows what it hides behind its seed.
_NUM_PROBES = 4

GameSettings = TextArenaEnvConfig | GymnasiumTextEnvConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class GameTurn:
    """Holds a game's answer to one text. ``is_cut``: it ended by a limit of its own."""

    text: str
    reward: float
    is_over: bool
    is_success: bool = False
    is_cut: bool = False


class Game(Protocol):
    """Plays a game for one player, an episode at a time."""

    def start(self, seed: int) -> str:
        """Begins an episode; returns the first text."""
        ...

    def play(self, text: str) -> GameTurn:
        """Takes the player's text."""
        ...


class GameEnv:
    """Plays one episode of at most ``max_steps`` turns; what the game says is the next message.

    An episode is held out by its first text, or by its seed where the first text is the same for every seed.
    """

    def __init__(self, settings: GameSettings, *, max_steps: int, split: Split) -> None:
        check_split(split, settings.held_out_fraction)
        self._settings = settings
        self._max_steps = max_steps
        self._split = split
        self._game = open_game(settings)
        self._random = _OwnRandom()
        self._turn = 0

    def reset(self, seed: int) -> list[Message]:
        """Begins the episode of ``seed`` or, where the split may not play it, of seeds derived from it.

        Raises:
            ConfigError: none of the episodes drawn is in the split.
        """
        settings = self._settings
        shows_start = _shows_start(type(settings), settings.model_dump_json())
        num_draws = max_draws(self._split, settings.held_out_fraction)
        for draw in range(num_draws):
            drawn = seed if draw == 0 else derive_seed(seed, "game", draw)
            with self._random.playing(drawn):
                text = self._game.start(drawn)
            if is_in_split([text if shows_start else f"seed {drawn}"], self._split, settings.held_out_fraction):
                break
        else:
            raise ConfigError(
                f"{settings.name}: none of {num_draws} episodes is in the split '{self._split}' with "
                f"held_out_fraction {settings.held_out_fraction}: choose settings with more beginnings, or another "
                "fraction"
            )
        self._turn = 0
        first: list[Message] = [{"role": "user", "content": text}]
        return (
            first if settings.system_prompt is None else [{"role": "system", "content": settings.system_prompt}, *first]
        )

    def answer(self, text: str) -> TextAnswer:
        """Gives the game a text; one on which the game itself fails ends the episode, without a reward."""
        self._turn += 1
        try:
            with self._random.playing():
                said = self._game.play(text)
        except Exception:  # noqa: BLE001 - games parse whatever a policy wrote, and some raise where they cannot
            said = GameTurn(text="", reward=0.0, is_over=True, is_cut=True)
        is_out_of_turns = not said.is_over and self._turn >= self._max_steps
        return TextAnswer(
            reward=said.reward,
            is_success=said.is_success,
            reply=None if said.is_over or is_out_of_turns else said.text,
            is_cut=said.is_cut or is_out_of_turns,
        )

    def own_answer(self) -> None:
        """Games name no right move."""


class _OwnRandom:
    """A game's own state of the process's generators."""

    def __init__(self) -> None:
        self._state: tuple[Any, Any] | None = None

    @contextmanager
    def playing(self, seed: int | None = None) -> Iterator[None]:
        """In the block the generators are the game's, from ``seed`` or as it left them."""
        outer = random.getstate(), np.random.get_state()
        if seed is not None or self._state is None:
            random.seed(seed or 0)
            np.random.seed(seed or 0)
        else:
            _set_generators(self._state)
        try:
            yield
        finally:
            self._state = random.getstate(), np.random.get_state()
            _set_generators(outer)


def _set_generators(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


@cache
def _shows_start(kind: type[GameSettings], settings: str) -> bool:
    """Says whether episodes of these settings (JSON of ``kind``) begin with different texts."""
    game, own = open_game(kind.model_validate_json(settings)), _OwnRandom()
    texts = set()
    for number in range(_NUM_PROBES):
        with own.playing(derive_seed(number, "probe")):
            texts.add(game.start(derive_seed(number, "probe")))
    return len(texts) > 1


def open_game(settings: GameSettings) -> Game:
    """Opens a game.

    Raises:
        ConfigError: its package or its data are not here, or it cannot be played by one player in text.
    """
    return TextArenaGame(settings) if isinstance(settings, TextArenaEnvConfig) else GymnasiumGame(settings)


class TextArenaGame:
    """A game of textarena without its wrappers: the player's own texts are in the conversation already."""

    def __init__(self, settings: TextArenaEnvConfig) -> None:
        try:
            import textarena
            from textarena.envs.registration import ENV_REGISTRY
        except ImportError as error:
            raise ConfigError(
                f"env_type textarena needs the package textarena, and it cannot be imported ({error}): pip install "
                "'mock-scheduler[text]'"
            ) from error
        name = settings.game
        if name not in ENV_REGISTRY:
            near = get_close_matches(name, list(ENV_REGISTRY), n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f"game: textarena has no '{name}'{hint}")
        self._name = name
        self._player_action = textarena.ObservationType.PLAYER_ACTION
        with self._refusing():
            game = textarena.make(name, **settings.game_config)
        while isinstance(game, textarena.Wrapper):
            game = game.env
        self._game: Any = game

    def start(self, seed: int) -> str:
        """Begins an episode for one player.

        Raises:
            ConfigError: the game needs several players, or data that are not here.
        """
        with self._refusing():
            self._game.reset(num_players=1, seed=seed)
            return self._read()

    def play(self, text: str) -> GameTurn:
        """Takes a move; the game's reward comes with its end, and 1 is a success."""
        is_over, _ = self._game.step(action=text)
        if not is_over:
            return GameTurn(text=self._read(), reward=0.0, is_over=False)
        rewards, _ = self._game.close()
        reward = float((rewards or {}).get(_PLAYER, 0.0))
        return GameTurn(text="", reward=reward, is_over=True, is_success=reward >= 1.0)

    def _read(self) -> str:
        _, said = self._game.get_observation()
        return "\n".join(text for _, text, kind in said if kind is not self._player_action)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Lets nothing be downloaded, and names what a game lacks."""
        import nltk  # a dependency of textarena's, by which its games of words fetch their lists

        download, nltk.download = nltk.download, lambda *_, **__: False
        try:
            yield
        except LookupError as error:
            raise ConfigError(
                f"game: '{self._name}' needs word lists of NLTK that are not here, and nothing is downloaded: get them "
                "once with `python -m nltk.downloader words averaged_perceptron_tagger_eng`, or choose another game"
            ) from error
        except Exception as error:  # whatever a hundred games raise
            raise ConfigError(
                f"game: '{self._name}' cannot be played by one player with these settings: {type(error).__name__}: "
                f"{error}"
            ) from error
        finally:
            nltk.download = download


class GymnasiumGame:
    """An environment of gymnasium whose observations and actions are texts."""

    def __init__(self, settings: GymnasiumTextEnvConfig) -> None:
        import gymnasium

        try:
            self._game: Any = gymnasium.make(settings.env_id, disable_env_checker=True, **settings.env_kwargs)
        except Exception as error:  # whatever an environment's own code raises
            raise ConfigError(
                f"env_id: gymnasium cannot make '{settings.env_id}': {type(error).__name__}: {error}; write "
                "MODULE:NAME where a module of yours registers it"
            ) from error
        spaces = {"observation_space": self._game.observation_space, "action_space": self._game.action_space}
        wrong = [f"{name} is {space}" for name, space in spaces.items() if not isinstance(space, gymnasium.spaces.Text)]
        if wrong:
            raise ConfigError(
                f"env_id: '{settings.env_id}' does not speak text: {', '.join(wrong)}; expected gymnasium.spaces.Text "
                "for both (wrap it)"
            )

    def start(self, seed: int) -> str:
        """Begins an episode."""
        text, _ = self._game.reset(seed=seed)
        return str(text)

    def play(self, text: str) -> GameTurn:
        """Takes an action. ``info["is_success"]`` says a success; without it, a positive reward at the end does."""
        said, reward, terminated, truncated, info = self._game.step(text)
        return GameTurn(
            text=str(said),
            reward=float(reward),
            is_over=bool(terminated or truncated),
            is_success=bool(info.get("is_success", terminated and reward > 0)),
            is_cut=bool(truncated and not terminated),
        )


def check_games(envs: Mapping[str, CustomEnvConfig]) -> None:
    """Opens the game of every tag, and begins an episode.

    Raises:
        ConfigError: with every game that cannot be played.
    """
    problems = []
    for tag, env in envs.items():
        if not isinstance(env.env_config, TextArenaEnvConfig | GymnasiumTextEnvConfig):
            continue
        try:
            game = open_game(env.env_config)
            with _OwnRandom().playing(0):
                game.start(0)
        except ConfigError as problem:
            problems.append(f"custom_envs.{tag}.env_config.{problem}")
    if problems:
        raise ConfigError(f"games that cannot be played:{bullet_list(problems, limit=None)}")
