"""Defines the one interface of rollout engines: whole turns of running episodes, sampled together.

Contract: what is sampled follows from the weights, and from a turn's identity, number and history alone; never from the
layout, the order of turns or timing. An engine may be another program: its answers are checked before they are rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from mock_scheduler.batch import SampleIdentity
from mock_scheduler.scheduler import Mode
from pipelines.config.engine import GeneratingArgs

Finish = Literal["stop", "length", "abort"]
"""The end of a turn: a token that ends turns, no room for another token, or the engine gave it up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRules:
    """Holds the ends of a turn. ``ends_turn``: whether a token ends it; ``sequence_length``: tokens of an episode."""

    ends_turn: Callable[[int], bool]
    max_new_tokens: int
    sequence_length: int

    def room(self, history: Sequence[int]) -> int:
        """Returns the most tokens of a turn after ``history``."""
        return min(self.max_new_tokens, self.sequence_length - len(history))


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenTurn:
    """Holds a turn to sample. ``row``: of the episode in its block; ``number``: of the turn in its episode, from 0.

    ``history``: every token before it, not empty. ``room``: the most tokens that it may have, at least 1.
    """

    row: int
    identity: SampleIdentity
    number: int
    history: Sequence[int]
    room: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTurn:
    """Holds a sampled turn: its tokens, at most ``room``, each with its log-probability. No tokens only where aborted.

    ``routed_experts``: ``[n, layers, topk]``, of history and turn without the last token; ``None`` where not recorded.
    """

    row: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish: Finish
    routed_experts: torch.Tensor | None = None


TurnSampler = Callable[[Sequence[OpenTurn]], list[SampledTurn]]
"""Samples turns of a block: returns those of the open ones that have ended, by row; the others are to be given again.

Each call gets every open turn of the block, by row."""


class RolloutEngine(Protocol):
    """Every rank holds one, and calls it alike except where a method says otherwise."""

    @property
    def logprobs_mode(self) -> Literal["processed", "raw"]:
        """The distribution that its log-probabilities are of."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Returns this rank's counts so far, by the names of metrics."""
        ...

    @property
    def measured(self) -> Mapping[str, float]:
        """Returns measurements of the last update of weights, by the names of metrics."""
        ...

    def update_weights(self, policy_version: int) -> None:
        """Samples by the trainer's present weights from now on."""

    def check_version(self, policy_version: int) -> None:
        """Raises ``SchedulerError`` where it samples by weights of another version."""

    def generating(self, args: GeneratingArgs) -> AbstractContextManager[None]:
        """Samples by ``args`` in the block."""
        ...

    def open_block(self, mode: Mode, rules: TurnRules) -> TurnSampler:
        """Begins another block of episodes. The leader of a replica calls it; it does not communicate."""
        ...

    def follow(self) -> None:
        """Takes part in the leader's work until it finishes. Every other rank of the replica."""

    def finish(self) -> None:
        """Releases the followers. The leader of a replica calls it."""

    def close(self) -> None:
        """Ends whatever it began."""


class SampleFunction(Protocol):
    """Draws the next token of some rows of a block."""

    def __call__(
        self, rows: Sequence[int], histories: Sequence[Sequence[int]], uniforms: Sequence[float]
    ) -> tuple[list[int], list[float]]:
        """Draws tokens and their log-probabilities, by block row, all tokens so far and a number in [0, 1) of each."""
        ...


UniformFunction = Callable[[SampleIdentity, int, int], float]
"""The number that decides a token, by episode, turn and the token's index within the turn."""


@dataclass(kw_only=True, slots=True)
class _Said:
    """Holds a turn so far; ``tokens``: with the history before them."""

    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)


class TokenwiseTurns:
    """Samples the turns of a block token by token: each call draws the next one of every open turn."""

    def __init__(
        self,
        sample: SampleFunction,
        uniform: UniformFunction,
        rules: TurnRules,
        *,
        routing: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """``routing``: from a row to the experts of the tokens that it has read."""
        self._sample = sample
        self._routing = routing
        self._uniform = uniform
        self._ends_turn = rules.ends_turn
        self._said: dict[int, _Said] = {}

    def __call__(self, turns: Sequence[OpenTurn]) -> list[SampledTurn]:
        """Returns the turns that their next token has ended."""
        said = [self._said.setdefault(turn.row, _Said(tokens=list(turn.history))) for turn in turns]
        uniforms = [
            self._uniform(turn.identity, turn.number, len(one.logprobs)) for turn, one in zip(turns, said, strict=True)
        ]
        tokens, logprobs = self._sample([turn.row for turn in turns], [one.tokens for one in said], uniforms)
        for one, token, logprob in zip(said, tokens, logprobs, strict=True):
            one.tokens.append(token)
            one.logprobs.append(logprob)
        return [self._end(turn) for turn, one in zip(turns, said, strict=True) if self._has_ended(turn, one)]

    def _has_ended(self, turn: OpenTurn, said: _Said) -> bool:
        return len(said.logprobs) >= turn.room or self._ends_turn(said.tokens[-1])

    def _end(self, turn: OpenTurn) -> SampledTurn:
        said = self._said.pop(turn.row)
        return SampledTurn(
            row=turn.row,
            tokens=said.tokens[len(turn.history) :],
            logprobs=said.logprobs,
            finish="stop" if self._ends_turn(said.tokens[-1]) else "length",
            routed_experts=None if self._routing is None else self._routing(turn.row),
        )
