"""Keeps environments by slot, and answers batches of calls to them; failures are data.

Contract: imports neither torch nor Megatron, since worker processes import it; everything sent through a pipe is
defined here or in ``base``.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from mock_scheduler.errors import ConfigError
from pipelines.config.environments import CustomEnvConfig
from pipelines.environments.base import (
    ResetRequest,
    ResetResult,
    Split,
    StepResult,
    TokenEnvironment,
    Tokenizer,
)
from pipelines.environments.registry import build_environment

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetCall:
    """Holds a call to start these episodes, in this order."""

    requests: Sequence[ResetRequest]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCall:
    """Holds a call to take these turns, each a slot and its sampled tokens, in this order."""

    turns: Sequence[tuple[int, Sequence[int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFailure:
    """An environment's error in ``slot``; ``is_config_error``: its settings are at fault, and not the environment."""

    slot: int
    message: str
    is_config_error: bool
    traceback_text: str


Call = ResetCall | StepCall
Answer = list[ResetResult] | list[StepResult] | CallFailure


class EnvironmentSlots:
    """Environments by (slot, tag, split), built on first use and kept; a slot plays the episode reset last."""

    def __init__(self, custom_envs: Mapping[str, CustomEnvConfig], tokenizer: Tokenizer) -> None:
        self._custom_envs = custom_envs
        self._tokenizer = tokenizer
        self._environments: dict[tuple[int, str, Split], TokenEnvironment] = {}
        self._playing: dict[int, TokenEnvironment] = {}

    def answer(self, call: Call) -> Answer:
        """Returns the results of a call in its order, or the first failure; nothing is done after a failure."""
        if isinstance(call, ResetCall):
            return _answer_each(call.requests, self._reset, slot_of=lambda request: request.slot)
        return _answer_each(call.turns, self._step, slot_of=lambda turn: turn[0])

    def close(self) -> None:
        """Closes all environments."""
        for environment in self._environments.values():
            environment.close()
        self._environments.clear()
        self._playing.clear()

    def _reset(self, request: ResetRequest) -> ResetResult:
        key = (request.slot, request.tag, request.split)
        if key not in self._environments:
            self._environments[key] = build_environment(
                self._custom_envs[request.tag], self._tokenizer, split=request.split
            )
        environment = self._playing[request.slot] = self._environments[key]
        started = environment.reset(request.seed)
        return replace(started, answer=environment.own_answer()) if request.shows_answer else started

    def _step(self, turn: tuple[int, Sequence[int]]) -> StepResult:
        slot, tokens = turn
        return self._playing[slot].step(tokens)


def _answer_each(
    items: Sequence[Item], perform: Callable[[Item], Result], *, slot_of: Callable[[Item], int]
) -> list[Result] | CallFailure:
    results = []
    for item in items:
        try:
            results.append(perform(item))
        except Exception as error:  # noqa: BLE001 - the edge of what the pool answers for
            return CallFailure(
                slot=slot_of(item),
                message=str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}",
                is_config_error=isinstance(error, ConfigError),
                traceback_text=traceback.format_exc(),
            )
    return results
