"""The interface between the rollout scheduler and an environment: tokens in, tokens out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, Protocol

Split = Literal["train", "held_out", "all"]
"""The layouts that an environment plays: all but held-out ones, held-out ones, or any."""

UNKNOWN_LENGTH = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetRequest:
    """Starts an episode of ``tag`` in ``slot``, its number among the episodes played at the same time."""

    slot: int
    tag: str
    seed: int
    split: Split


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetResult:
    """The start of an episode. ``observation``: the first prompt's tokens, which end with the query.

    ``optimal_length``: actions of the shortest successful episode, -1 where not known (slippery ice).
    ``layout_digest``: stands for the episode's first board (see ``compute_layout_digest``).
    """

    observation: list[int]
    optimal_length: int
    layout_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The answer to one action. ``observation``: the next tokens for the policy, ending with the query.

    ``is_valid``: the token named an action; ``is_success``: this action reached the goal, or solved the puzzle.
    """

    observation: list[int]
    reward: float
    terminated: bool
    truncated: bool
    is_valid: bool
    is_success: bool


class TokenEnvironment(Protocol):
    """An episode at a time; ``reset`` may be called again for the next."""

    def reset(self, seed: int) -> ResetResult:
        """Starts an episode; the same seed gives the same episode."""
        ...

    def step(self, token: int) -> StepResult:
        """Takes the action that ``token`` names; an invalid one is penalised and leaves the board as it is."""
        ...

    def close(self) -> None:
        """Frees the environment's resources."""
        ...


def compute_layout_digest(board: str) -> str:
    """Digests a board's text, row by row, as the tokens show it: the first 16 hexadecimal digits of SHA-256."""
    return hashlib.sha256(board.encode()).hexdigest()[:16]
