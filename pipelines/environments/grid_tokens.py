"""Turns boards and actions into tokens of a small vocabulary and back; nothing is ever re-tokenised.

A cell's token carries both its place and its content, in the stead of a position within the turn: a small policy finds
the cell below the player without counting. The query at the end of a turn names the player's cell, gymnasium's own
integer observation. The vocabulary is the list of all tokens, in order. Contract: imports no gymnasium.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mock_scheduler.errors import ConfigError
from pipelines.environments.base import ResetResult, StepResult, compute_layout_digest

if TYPE_CHECKING:
    import gymnasium

PAD_ID = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GridTokenizer:
    """Holds tokens for boards of up to ``num_cells`` cells with the given glyphs and actions."""

    num_cells: int
    glyphs: str
    actions: tuple[str, ...]

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Returns every token's text, by id."""
        queries = (f"<act@{cell}>" for cell in range(self.num_cells))
        cells = (f"{cell}:{glyph}" for cell in range(self.num_cells) for glyph in self.glyphs)
        return ("<pad>", "<bos>", *self.actions, *queries, *cells)

    @property
    def display_texts(self) -> tuple[str, ...]:
        """Returns every token for human eyes, by id: joined, an episode's tokens draw its square boards row by row."""
        width = math.isqrt(self.num_cells)
        queries = ("" for _ in range(self.num_cells))
        cells = (
            f"{glyph}\n" if (cell + 1) % width == 0 else f"{glyph} "
            for cell in range(self.num_cells)
            for glyph in self.glyphs
        )
        return ("", "", *self.actions, *queries, *cells)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self._first_cell_id + self.num_cells * len(self.glyphs)

    @property
    def source(self) -> str:
        """Returns the ids follow from boards and actions."""
        return "environments"

    @property
    def bos_id(self) -> int:
        """The token that opens an episode."""
        return 1

    @property
    def action_ids(self) -> list[int]:
        """Returns the tokens that name actions."""
        return list(range(2, 2 + len(self.actions)))

    @property
    def _first_query_id(self) -> int:
        return 2 + len(self.actions)

    @property
    def _first_cell_id(self) -> int:
        return self._first_query_id + self.num_cells

    def action_of(self, token: int) -> int | None:
        """Returns the index of the action named by ``token``; ``None`` for any other token."""
        action = token - 2
        return action if 0 <= action < len(self.actions) else None

    def ends_turn(self, token: int) -> bool:
        """Says whether the token names an action."""
        return self.action_of(token) is not None

    def encode_board(self, board: str, player_cell: int) -> list[int]:
        """Encodes a board, given row by row: one token per cell, then the query, which asks for an action."""
        cells = [
            self._first_cell_id + cell * len(self.glyphs) + self.glyphs.index(glyph) for cell, glyph in enumerate(board)
        ]
        return [*cells, self._first_query_id + player_cell]

    def decode(self, tokens: Sequence[int]) -> list[str]:
        """Returns the text of each token."""
        vocabulary = self.vocabulary
        return [vocabulary[token] for token in tokens]

    def digest(self) -> str:
        """Digests the vocabulary: SHA-256, in hexadecimal."""
        return hashlib.sha256("\n".join(self.vocabulary).encode()).hexdigest()


class GridTokenEnvironment:
    """Makes gymnasium's grid environment a token environment: boards become tokens, and tokens actions.

    ``env``: observes its board as text and takes ``len(tokenizer.actions)`` for an answer without an action.
    ``player_glyphs``: one of them is on every board, on the player's cell.
    """

    def __init__(self, env: gymnasium.Env[str, int], tokenizer: GridTokenizer, *, player_glyphs: str) -> None:
        self._env = env
        self._tokenizer = tokenizer
        self._player_glyphs = player_glyphs

    def reset(self, seed: int) -> ResetResult:
        """Starts the episode of ``seed``; its first prompt opens with ``bos_id``."""
        board, info = self._env.reset(seed=seed)
        return ResetResult(
            observation=[self._tokenizer.bos_id, *self._encode(board)],
            optimal_length=info["optimal_length"],
            layout_digest=compute_layout_digest(board),
        )

    def own_answer(self) -> list[int]:
        """Raises ``ConfigError``: a board says no action."""
        raise ConfigError("a board knows no answer of its own: sft needs an environment of text that does")

    def step(self, tokens: Sequence[int]) -> StepResult:
        """Takes the action named by the last token; any other token is an invalid turn."""
        action = self._tokenizer.action_of(tokens[-1])
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
