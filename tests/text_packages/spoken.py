"""An environment of gymnasium that speaks text: ``spoken:Echo-v0`` wants back the word that it said."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class EchoEnv(gymnasium.Env[str, str]):
    """Says a number and wants it back; three turns at most."""

    observation_space = gymnasium.spaces.Text(max_length=20)
    action_space = gymnasium.spaces.Text(max_length=20, min_length=0)

    def __init__(self, prefix: str = "say") -> None:
        self._prefix = prefix

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Draws the number, by gymnasium's generator and, as some do, by NumPy's."""
        super().reset(seed=seed)
        self._turn = 0
        self._word = str(self.np_random.integers(1000) + np.random.randint(2))
        return f"{self._prefix} {self._word}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes a word."""
        self._turn += 1
        is_right = action == self._word
        return "again", float(is_right), is_right, self._turn == 3, {}


gymnasium.register(id="Echo-v0", entry_point="spoken:EchoEnv")
