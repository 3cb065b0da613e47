"""A small stand-in for textarena 0.7.4 with the interface that is used; ``tests/integrations/test_text.py`` has it."""

from __future__ import annotations

import random
from enum import Enum, auto
from typing import Any

import nltk


class ObservationType(Enum):
    """The kinds of messages that are looked at."""

    PROMPT = auto()
    PLAYER_ACTION = auto()
    GAME_MESSAGE = auto()


class GuessEnv:
    """A number to guess: drawn from the global generator, as the package's games do, and again after every guess."""

    shows_number = False

    def __init__(self, max_number: int = 20) -> None:
        self._max_number = max_number

    def reset(self, num_players: int, seed: int | None = None) -> None:
        """Begins a game."""
        assert num_players == 1, f"The number of players has to be 1, received {num_players}"
        random.seed(seed)
        self._draw()
        shown = f" It is {self._number}." if self.shows_number else ""
        self._said = [(-1, f"Guess a number up to {self._max_number}.{shown}", ObservationType.PROMPT)]

    def _draw(self) -> None:
        self._number = random.randint(1, self._max_number)

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        """Takes a guess; fails on a text that is no number in brackets."""
        guess = int(action.strip("[]"))
        self._said.append((0, action, ObservationType.PLAYER_ACTION))
        self._is_right = guess == self._number
        self._draw()
        self._said.append((-1, f"No; now it is {self._number}.", ObservationType.GAME_MESSAGE))
        return self._is_right, {}

    def get_observation(self) -> tuple[int, list[tuple[int, str, ObservationType]]]:
        """The messages since the last time."""
        said, self._said = self._said, []
        return 0, said

    def close(self) -> tuple[dict[int, float], dict[int, Any]]:
        """The rewards of a finished game."""
        return {0: 1.0 if self._is_right else 0.0}, {}


class OpenEnv(GuessEnv):
    """Shows the number at the beginning."""

    shows_number = True


class PairEnv(GuessEnv):
    """Needs two players."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        """Refuses one."""
        assert num_players == 2, f"The number of players has to be 2, received {num_players}"


class WordsEnv(GuessEnv):
    """Needs word lists, which it tries to get."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        """Asks for a download, and finds nothing."""
        nltk.download("words")
        raise LookupError("Resource words not found.")


class Wrapper:
    """Around a game."""

    def __init__(self, env: Any) -> None:
        self.env = env


_GAMES = {"Guess-v0": GuessEnv, "Open-v0": OpenEnv, "Pair-v0": PairEnv, "Words-v0": WordsEnv}


def make(name: str, **settings: Any) -> Wrapper:
    """A game with its usual wrapper."""
    return Wrapper(_GAMES[name](**settings))
