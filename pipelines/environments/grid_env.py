"""The base of the grid environments: a gymnasium environment whose observation is its board as text.

Contract: actions 0 to ``len(actions)`` - 1 are the game's; the next number stands for an answer without an action: it
moves nothing and is penalised. The episode is truncated after ``max_steps`` turns, valid or not. A reset's ``info``
holds ``optimal_length``; a step's holds ``is_valid`` and ``is_success``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import gymnasium
from gymnasium import spaces


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Holds the result of one action of the game."""

    reward: float
    terminated: bool
    is_success: bool


class GridEnv(gymnasium.Env[str, int]):
    """A board of ``num_cells`` cells in ``glyphs``; a game says how it starts, moves and looks."""

    def __init__(self, *, num_cells: int, glyphs: str, num_actions: int, max_steps: int) -> None:
        self.observation_space = spaces.Text(min_length=num_cells, max_length=num_cells, charset=glyphs)
        # Gymnasium annotates the space's samples, numpy's integers; a step takes any integer.
        self.action_space = cast("spaces.Space[int]", spaces.Discrete(num_actions + 1))
        self._num_actions = num_actions
        self._max_steps = max_steps
        self._turn = 0
        self._is_running = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts the episode of ``seed``; ``None``: of a seed drawn by the environment. There are no options.

        Raises:
            ConfigError: no layout was found for the settings.
        """
        super().reset(seed=seed)
        optimal_length = self._start(int(self.np_random.integers(2**31)) if seed is None else seed)
        self._turn = 0
        self._is_running = True
        return self._render_board(), {"optimal_length": optimal_length}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes one action; raises ``RuntimeError`` outside an episode, ``ValueError`` for a number out of range."""
        if not self._is_running:
            raise RuntimeError("step was called without an episode: reset the environment first")
        if not 0 <= action <= self._num_actions:
            raise ValueError(f"action {action} is not in 0 to {self._num_actions}")
        is_valid = action < self._num_actions
        if is_valid:
            move = self._move(int(action))
        else:
            move = Move(reward=self.invalid_reward, terminated=False, is_success=False)
        self._turn += 1
        truncated = not move.terminated and self._turn >= self._max_steps
        self._is_running = not (move.terminated or truncated)
        info = {"is_valid": is_valid, "is_success": move.is_success}
        return self._render_board(), move.reward, move.terminated, truncated, info

    @property
    @abstractmethod
    def invalid_reward(self) -> float:
        """Returns the reward of a turn without an action."""

    @abstractmethod
    def _start(self, seed: int) -> int:
        """Sets the board of ``seed`` up; returns the length of its shortest solution, -1 where it is not known."""

    @abstractmethod
    def _move(self, action: int) -> Move:
        """Takes one action of the game."""

    @abstractmethod
    def _render_board(self) -> str:
        """Renders the glyphs of all cells, row by row."""
