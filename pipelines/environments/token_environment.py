"""A grid environment of gymnasium's as a token environment: boards become tokens, and tokens actions."""

from __future__ import annotations

import gymnasium

from pipelines.environments.base import ResetResult, StepResult, compute_layout_digest
from pipelines.environments.grid_tokens import GridTokenizer


class GridTokenEnvironment:
    """``env``: observes its board as text and takes ``len(tokenizer.actions)`` for an answer that is no action.

    ``player_glyphs``: those that show where the player is, one of which is on every board.
    """

    def __init__(self, env: gymnasium.Env[str, int], tokenizer: GridTokenizer, *, player_glyphs: str) -> None:
        self._env = env
        self._tokenizer = tokenizer
        self._player_glyphs = player_glyphs

    def reset(self, seed: int) -> ResetResult:
        """Start the episode of ``seed``; its first prompt opens with the tokenizer's first token."""
        board, info = self._env.reset(seed=seed)
        return ResetResult(
            observation=[self._tokenizer.bos_id, *self._encode(board)],
            optimal_length=info["optimal_length"],
            layout_digest=compute_layout_digest(board),
        )

    def step(self, token: int) -> StepResult:
        """Take the action that ``token`` names; any other token is an invalid turn."""
        action = self._tokenizer.action_of(token)
        board, reward, terminated, truncated, info = self._env.step(
            len(self._tokenizer.actions) if action is None else action
        )
        return StepResult(
            observation=self._encode(board),
            reward=float(reward),
            terminated=terminated,
            truncated=truncated,
            is_valid=info["is_valid"],
            is_success=info["is_success"],
        )

    def close(self) -> None:
        """Close gymnasium's environment."""
        self._env.close()

    def _encode(self, board: str) -> list[int]:
        player_cell = next(cell for cell, glyph in enumerate(board) if glyph in self._player_glyphs)
        return self._tokenizer.encode_board(board, player_cell)
