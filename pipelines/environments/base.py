"""Defines the interfaces between the rollout scheduler, a run's tokenizer and an environment: tokens in, tokens out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Split = Literal["train", "held_out", "all"]
"""The layouts that an environment plays: all but held-out ones, held-out ones, or any."""

UNKNOWN_LENGTH = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetRequest:
    """Starts an episode of ``tag`` in ``slot``, its number among the episodes played at the same time.

    ``shows_answer``: the result has the environment's own answer, for the supervised start.
    """

    slot: int
    tag: str
    seed: int
    split: Split
    shows_answer: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetResult:
    """Holds the start of an episode. ``observation``: the first prompt's tokens, which end with the query.

    ``optimal_length``: actions of the shortest successful episode, -1 where not known (slippery ice).
    ``layout_digest``: stands for the episode's first board (see ``compute_layout_digest``).
    ``answer``: the tokens of a whole turn with the right answer, where it was asked for.
    """

    observation: list[int]
    optimal_length: int
    layout_digest: str
    answer: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Holds the answer to one turn. ``observation``: the next tokens for the policy, ending with the query.

    ``is_valid``: the turn named an action, or a text that ended by itself; ``is_success``: this turn reached the goal,
    or solved the puzzle.
    """

    observation: list[int]
    reward: float
    terminated: bool
    truncated: bool
    is_valid: bool
    is_success: bool


class Tokenizer(Protocol):
    """The meaning of a run's token ids. Workers get a copy of it, so it can be pickled."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    @property
    def source(self) -> str:
        """What the meaning of the ids follows from: ``environments`` or ``tokenizer``."""
        ...

    @property
    def vocabulary(self) -> Sequence[str]:
        """Returns every token's text, by id."""
        ...

    @property
    def display_texts(self) -> Sequence[str]:
        """Returns every token for human eyes, by id."""
        ...

    @property
    def action_ids(self) -> list[int]:
        """Returns the tokens that name actions."""
        ...

    def ends_turn(self, token: int) -> bool:
        """Says whether a sampled token ends its turn."""
        ...

    def digest(self) -> str:
        """Digests the meaning of all ids: SHA-256, in hexadecimal."""
        ...


class TokenEnvironment(Protocol):
    """An episode at a time; ``reset`` may be called again for the next."""

    def reset(self, seed: int) -> ResetResult:
        """Starts an episode; the same seed gives the same episode."""
        ...

    def own_answer(self) -> list[int]:
        """Returns the tokens of a first turn with the right answer; raises ``ConfigError`` where none is known."""
        ...

    def step(self, tokens: Sequence[int]) -> StepResult:
        """Takes the sampled tokens of one turn: a board its last one, which names an action, a text all of them."""
        ...

    def close(self) -> None:
        """Frees the environment's resources."""
        ...


def compute_layout_digest(board: str) -> str:
    """Digests a board's text, row by row, as the tokens show it: the first 16 hexadecimal digits of SHA-256."""
    return hashlib.sha256(board.encode()).hexdigest()[:16]
