"""Gymnasium's FrozenLake as a multi-turn token environment.

Glyphs on the board: ``P`` player, ``_`` frozen or start, ``O`` hole, ``G`` goal, ``X`` player in a hole, ``√`` player
on the goal. Reward 1 on reaching the goal; an invalid action costs ``format_penalty`` and moves nothing; the episode
is truncated after ``max_steps`` turns.
"""

from __future__ import annotations

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from mock_scheduler.config.schema import CustomEnvConfig
from pipelines.environments.base import StepResult
from pipelines.environments.frozen_lake_alphabet import PLAIN, UNDER_PLAYER
from pipelines.environments.grid_tokens import GridTokenizer


class FrozenLakeEnvironment:
    """One FrozenLake; a random map is drawn from the episode's seed."""

    def __init__(self, config: CustomEnvConfig, tokenizer: GridTokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._env: gymnasium.Env[int, int] | None = None
        self._turn = 0
        self._board = ""
        self._state = 0

    def reset(self, seed: int) -> list[int]:
        """Start an episode on the fixed map, or on a map drawn from ``seed``."""
        settings = self._config.env_config
        if self._env is None or settings.map_name is None:
            self.close()
            rows = None if settings.map_name else generate_random_map(settings.size, settings.p, seed=seed)
            self._env = gymnasium.make(
                "FrozenLake-v1", desc=rows, map_name=settings.map_name, is_slippery=settings.is_slippery
            )
        self._state, _ = self._env.reset(seed=seed)
        self._board = b"".join(self._env.unwrapped.desc.flatten()).decode()  # type: ignore[attr-defined]
        self._turn = 0
        return [self._tokenizer.bos_id, *self._observe()]

    def step(self, token: int) -> StepResult:
        """Move, or pay for an invalid action."""
        if self._env is None:
            raise RuntimeError("FrozenLakeEnvironment.step was called before reset")
        self._turn += 1
        out_of_turns = self._turn >= self._config.max_steps
        action = self._tokenizer.action_of(token)
        if action is None:
            penalty = self._config.env_config.format_penalty
            return StepResult(observation=self._observe(), reward=penalty, terminated=False, truncated=out_of_turns)
        self._state, reward, terminated, truncated, _ = self._env.step(action)
        return StepResult(
            observation=self._observe(),
            reward=float(reward),
            terminated=terminated,
            truncated=not terminated and (truncated or out_of_turns),
        )

    def close(self) -> None:
        """Close gymnasium's environment."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _observe(self) -> list[int]:
        cells = ((UNDER_PLAYER if cell == self._state else PLAIN)[content] for cell, content in enumerate(self._board))
        return self._tokenizer.encode_board("".join(cells), self._state)
