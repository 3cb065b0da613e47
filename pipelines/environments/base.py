"""What the rollout scheduler asks of an environment: tokens in, tokens out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The answer to one action. ``observation``: the tokens that the policy sees next, ending with the query."""

    observation: list[int]
    reward: float
    terminated: bool
    truncated: bool


class TokenEnvironment(Protocol):
    """An episode at a time; ``reset`` may be called again for the next."""

    def reset(self, seed: int) -> list[int]:
        """Start an episode; the same seed gives the same episode. Returns the first prompt's tokens."""
        ...

    def step(self, token: int) -> StepResult:
        """Take the action that ``token`` names; an invalid one is penalised and leaves the board as it is."""
        ...

    def close(self) -> None:
        """Free what the environment holds."""
        ...
