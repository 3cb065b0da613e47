"""Plays a recorded trajectory again, and compares the environment's answers with the recorded ones.

A trajectory is one row of all its turns, or (``rollout_form: step``) one row per turn, each with the whole history and
only its own turn marked as sampled. The environment is given the sampled tokens of each turn.

Contract: all tokens of the environment, every turn's reward and the end of the trajectory are compared, up to the first
difference; rewards in a recording's float32. An aborted trajectory was ended by its engine: it differs only where its
environment had ended it before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from mock_scheduler.batch import Termination, Trajectory
from mock_scheduler.support.text import count_of
from pipelines.environments.base import StepResult, TokenEnvironment, Tokenizer

Kind = Literal["prompt", "observation", "reward", "termination", "turns"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeDifference:
    """Holds the first difference of a trajectory, in the row named by ``identity``.

    ``turn``: the turn with a differing answer; ``None`` in the first prompt. ``position``: of the token in the row;
    ``None`` where no token differs. ``kind`` ``turns``: the row's turns contradict its tokens.
    """

    kind: Kind
    identity: str
    turn: int | None
    position: int | None
    recorded: str
    replayed: str

    def describe(self) -> str:
        """Returns ``default/group 0/episode 0/env 1/turn 0: reward of turn 2: recorded 1.0, replayed 0.0``."""
        turn = "" if self.turn is None else f" of turn {self.turn}"
        token = "" if self.position is None else f" at token {self.position}"
        return f"{self.identity}: {self.kind}{turn}{token}: recorded {self.recorded}, replayed {self.replayed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeComparison:
    """Holds the comparison of one trajectory; ``num_tokens``: its environment's tokens, each counted once."""

    num_rows: int
    num_turns: int
    num_tokens: int
    difference: EpisodeDifference | None


def replay_episode(
    rows: Sequence[Trajectory],
    environment: TokenEnvironment,
    tokenizer: Tokenizer,
    *,
    seed: int,
    sequence_length: int,
) -> EpisodeComparison:
    """Plays the rows of one trajectory, in the order of their turns, on the episode of ``seed``.

    ``sequence_length``: tokens of the longest row; a trajectory without room for an action ends truncated.
    """
    episode = _Episode(environment, tokenizer, seed=seed, sequence_length=sequence_length)
    num_rows = 0
    difference = None
    for row in rows:
        num_rows += 1
        difference = episode.play(row)
        if difference is not None:
            break
    else:
        difference = episode.compare_end(rows[-1])
    return EpisodeComparison(
        num_rows=num_rows, num_turns=episode.num_turns, num_tokens=episode.num_tokens, difference=difference
    )


class _Episode:
    """The replay of one trajectory so far. ``num_turns`` were played and ``num_tokens`` of its environment compared."""

    def __init__(self, environment: TokenEnvironment, tokenizer: Tokenizer, *, seed: int, sequence_length: int) -> None:
        self._environment = environment
        self._vocabulary = tokenizer.vocabulary
        self._sequence_length = sequence_length
        self._history = list(environment.reset(seed).observation)  # all that was said, the last observation included
        self._prompt_length = len(self._history)
        self._turn_ends: list[int] = []  # where in it the observation of each turn starts
        self._last: StepResult | None = None
        self.num_tokens = 0

    @property
    def num_turns(self) -> int:
        """Turns played so far."""
        return len(self._turn_ends)

    def play(self, row: Trajectory) -> EpisodeDifference | None:
        """Plays the turns marked as sampled in a row; returns the first difference."""
        tokens, turns = row.tokens.tolist(), _sampled_stretches(row.response_mask.tolist())
        difference = self._compare_turns(row, len(turns))
        checked = 0
        for (start, stop), reward in zip(turns, row.turn_rewards.tolist(), strict=False):
            difference = (
                difference
                or self._compare_tokens(row, tokens, checked, start)
                or self._take_turn(row, tokens[start:stop], reward)
            )
            checked = stop
        if difference is None and checked < len(tokens):
            difference = self._compare_tokens(row, tokens, checked, len(tokens))
        return difference

    def compare_end(self, row: Trajectory) -> EpisodeDifference | None:
        """Compares the recorded end with the environment's, or with the room in the sequence."""
        ended = self._ended()
        is_full = len(self._history) >= self._sequence_length
        expected = Termination.TRUNCATED if ended is None and is_full else ended
        if row.termination is expected or (row.termination is Termination.ABORTED and ended is None):
            return None
        return self._difference(
            row,
            "termination",
            recorded=row.termination.name.lower(),
            replayed="that it goes on" if expected is None else expected.name.lower(),
        )

    def _ended(self) -> Termination | None:
        """Says how the environment ended the episode; ``None`` while it goes on."""
        if self._last is None or not (self._last.terminated or self._last.truncated):
            return None
        return Termination.TERMINATED if self._last.terminated else Termination.TRUNCATED

    def _compare_turns(self, row: Trajectory, num_sampled: int) -> EpisodeDifference | None:
        num_rewards = len(row.turn_rewards)
        if num_rewards != num_sampled:
            recorded, replayed = count_of(num_rewards, "reward"), count_of(num_sampled, "turn") + " in its tokens"
        elif row.identity.turn not in (0, self.num_turns):
            recorded, replayed = f"turn {row.identity.turn}", f"that turn {self.num_turns} comes next"
        else:
            return None
        return EpisodeDifference(
            kind="turns", identity=str(row.identity), turn=None, position=None, recorded=recorded, replayed=replayed
        )

    def _compare_tokens(
        self, row: Trajectory, tokens: Sequence[int], start: int, stop: int
    ) -> EpisodeDifference | None:
        """Compares a row's tokens between two places with the rest of the history from there."""
        recorded, replayed = tokens[start:stop], self._history[start:]
        if recorded == replayed:
            answered_from = self._turn_ends[-1] if self._turn_ends else 0
            self.num_tokens += stop - max(start, answered_from)
            return None
        shared = next((i for i, (a, b) in enumerate(zip(recorded, replayed, strict=False)) if a != b), None)
        offset = min(len(recorded), len(replayed)) if shared is None else shared
        position = start + offset
        is_prompt = position < self._prompt_length or not self._turn_ends
        turn = max(0, bisect_right(self._turn_ends, position) - 1)
        beyond = "nothing" if stop == len(tokens) else "a sampled token"
        return EpisodeDifference(
            kind="prompt" if is_prompt else "observation",
            identity=str(row.identity),
            turn=None if is_prompt else turn,
            position=position,
            recorded=self._text(recorded[offset]) if offset < len(recorded) else beyond,
            replayed=self._text(replayed[offset]) if offset < len(replayed) else "nothing",
        )

    def _take_turn(self, row: Trajectory, sampled: Sequence[int], reward: float) -> EpisodeDifference | None:
        ended = self._ended()
        if ended is not None:
            return self._difference(row, "termination", recorded="another turn", replayed=ended.name.lower())
        self._last = self._environment.step(sampled)
        self._history += sampled
        self._turn_ends.append(len(self._history))
        self._history += self._last.observation
        replayed = float(np.float32(self._last.reward))
        if replayed != reward:
            return self._difference(row, "reward", recorded=repr(reward), replayed=repr(replayed))
        return None

    def _difference(self, row: Trajectory, kind: Kind, *, recorded: str, replayed: str) -> EpisodeDifference:
        """Makes a difference in the answer to the last turn."""
        return EpisodeDifference(
            kind=kind,
            identity=str(row.identity),
            turn=self.num_turns - 1 if self.num_turns else None,
            position=None,
            recorded=recorded,
            replayed=replayed,
        )

    def _text(self, token: int) -> str:
        is_known = 0 <= token < len(self._vocabulary)
        return repr(self._vocabulary[token]) if is_known else f"token {token}, which the vocabulary does not have"


def _sampled_stretches(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Finds start and end of every stretch of sampled tokens: a turn, since an observation lies between any two."""
    edges = [place for place, (a, b) in enumerate(pairwise([False, *mask, False])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))
