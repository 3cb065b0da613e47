"""Plays the episodes of a block, and makes rows of a batch of them: one per episode, or per turn (``rollout_form``).

One forward pass gives every running episode its next token. A turn samples tokens until one ends it, or until
it has ``max_new_tokens``, or the sequence is full; the environment is given its tokens. Episodes go on
independently: one may sample the second token of a turn while another reads the next observation.

Every row carries the extras ``success`` (bool), ``optimal_length`` and ``num_invalid_actions`` (int32), and
``layout_digest`` (text). Extras, tag and termination are the episode's on each of its rows: a turn's row says how the
whole episode ended, and the last turn has the largest ``identity.turn``.

Contract: requests to the sampler depend on the block's own episodes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch

from mock_scheduler.batch import SampleIdentity, Termination, Trajectory
from mock_scheduler.batch.columns import RowValue
from pipelines.batch_metrics import OPTIMAL_LENGTH_EXTRA, SUCCESS_EXTRA
from pipelines.environments.base import ResetRequest, ResetResult, StepResult
from pipelines.rollout.plan import Block, EpisodePlan


class SampleFunction(Protocol):
    """Draws the next token of some rows of a block."""

    def __call__(
        self, rows: Sequence[int], histories: Sequence[Sequence[int]], uniforms: Sequence[float]
    ) -> tuple[list[int], list[float]]:
        """Draws tokens and their log-probabilities, by block row, all tokens so far and a number in [0, 1) of each."""
        ...


class Environments(Protocol):
    """Environments by slot, the episode's row in its block; ``EnvironmentPool`` is one."""

    def reset_many(self, requests: Sequence[ResetRequest]) -> list[ResetResult]:
        """Start these episodes."""
        ...

    def step_many(self, turns: Sequence[tuple[int, Sequence[int]]]) -> list[StepResult]:
        """Take these turns, each a slot and its sampled tokens."""
        ...


UniformFunction = Callable[[SampleIdentity, int, int], float]
"""The number that decides a token, by episode, turn and the token's index within the turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRules:
    """The ends of a turn. ``ends_turn``: whether a token ends it; ``sequence_length``: tokens of an episode."""

    ends_turn: Callable[[int], bool]
    max_new_tokens: int
    sequence_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of an episode, with ``tokens[start:stop]`` sampled."""

    start: int
    stop: int
    reward: float

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return self.stop - self.start


@dataclass(kw_only=True, slots=True)
class Episode:
    """An episode so far; ``sampled_logprobs``: of its sampled tokens, in order; ``turn_start``: of the running turn."""

    plan: EpisodePlan
    tokens: list[int] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    turn_start: int = 0
    prompt_length: int = 0
    termination: Termination | None = None
    is_success: bool = False
    num_invalid_actions: int = 0
    optimal_length: int = -1
    layout_digest: str = ""

    def start(self, start: ResetResult, rules: TurnRules) -> None:
        """Reads the first prompt; without room for an action after it, the episode ends truncated, with no turn."""
        self.optimal_length, self.layout_digest = start.optimal_length, start.layout_digest
        self._read(start.observation)
        self.prompt_length = len(self.tokens)
        if len(self.tokens) >= rules.sequence_length:
            self.termination = Termination.TRUNCATED

    @property
    def token_index(self) -> int:
        """The index of the next sampled token within its turn."""
        return len(self.tokens) - self.turn_start

    @property
    def turn_tokens(self) -> list[int]:
        """The tokens sampled in the running turn."""
        return self.tokens[self.turn_start :]

    def say(self, token: int, logprob: float) -> None:
        """Takes one sampled token."""
        self.tokens.append(token)
        self.sampled_logprobs.append(logprob)

    def has_ended_turn(self, rules: TurnRules) -> bool:
        """Says whether the last token goes to the environment, as an action or since no other can follow."""
        is_full = self.token_index >= rules.max_new_tokens or len(self.tokens) >= rules.sequence_length
        return is_full or rules.ends_turn(self.tokens[-1])

    def hear(self, answer: StepResult, rules: TurnRules) -> None:
        """Ends the turn with the environment's answer, and reads it if the sequence has room for another action."""
        self.turns.append(Turn(start=self.turn_start, stop=len(self.tokens), reward=answer.reward))
        self.num_invalid_actions += not answer.is_valid
        self.is_success = self.is_success or answer.is_success
        if answer.terminated:
            self.termination = Termination.TERMINATED
        elif answer.truncated or len(self.tokens) + len(answer.observation) >= rules.sequence_length:
            self.termination = Termination.TRUNCATED
        else:
            self._read(answer.observation)

    def _read(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self.turn_start = len(self.tokens)


def play_block(
    block: Block, environments: Environments, sample: SampleFunction, uniform: UniformFunction, *, rules: TurnRules
) -> list[Episode]:
    """Plays all episodes of a block to their end and returns them in the given order."""
    episodes = [Episode(plan=plan) for plan in block]
    requests = [
        ResetRequest(slot=row, tag=plan.tag, seed=plan.seed, split=plan.split) for row, plan in enumerate(block)
    ]
    for episode, start in zip(episodes, environments.reset_many(requests), strict=True):
        episode.start(start, rules)
    running = [row for row, episode in enumerate(episodes) if episode.termination is None]
    while running:
        _sample_next(episodes, running, sample, uniform)
        turn_ends = [row for row in running if episodes[row].has_ended_turn(rules)]
        if turn_ends:
            answers = environments.step_many([(row, episodes[row].turn_tokens) for row in turn_ends])
            for row, answer in zip(turn_ends, answers, strict=True):
                episodes[row].hear(answer, rules)
        running = [row for row in running if episodes[row].termination is None]
    return episodes


def _sample_next(
    episodes: Sequence[Episode], rows: Sequence[int], sample: SampleFunction, uniform: UniformFunction
) -> None:
    """Samples one token for each of these episodes."""
    chosen = [episodes[row] for row in rows]
    uniforms = [uniform(episode.plan.identity, len(episode.turns), episode.token_index) for episode in chosen]
    tokens, logprobs = sample(rows, [episode.tokens for episode in chosen], uniforms)
    for episode, token, logprob in zip(chosen, tokens, logprobs, strict=True):
        episode.say(token, logprob)


NUM_INVALID_EXTRA = "num_invalid_actions"
LAYOUT_DIGEST_EXTRA = "layout_digest"

RolloutForm = Literal["trajectory", "step"]


def episode_rows(episode: Episode, form: RolloutForm, *, policy_version: int) -> list[Trajectory]:
    """Makes the rows of a finished episode, in the order of its turns; without a turn, one row of its prompt.

    ``trajectory``: all tokens in one row. ``step``: a row per turn, of all tokens up to the turn's last sampled one;
    the row's prompt is everything before the turn's own tokens. Raises ``RuntimeError`` for an unfinished episode.
    """
    whole = _row(episode, episode.turns, policy_version=policy_version)
    if form == "trajectory" or not episode.turns:
        return [whole]
    return [
        replace(
            _row(episode, [turn], policy_version=policy_version),
            identity=replace(episode.plan.identity, turn=number),
            prompt_length=turn.start,
        )
        for number, turn in enumerate(episode.turns)
    ]


def _row(episode: Episode, turns: Sequence[Turn], *, policy_version: int) -> Trajectory:
    """Makes a row of all tokens up to the last sampled one of these successive turns; of all tokens without turns."""
    if episode.termination is None:
        raise RuntimeError(f"episode {episode.plan.identity} has not ended")
    tokens = episode.tokens[: turns[-1].stop] if turns else episode.tokens
    response_mask = torch.zeros(len(tokens), dtype=torch.bool)
    for turn in turns:
        response_mask[turn.start : turn.stop] = True
    num_before = sum(turn.num_tokens for turn in episode.turns if turns and turn.stop <= turns[0].start)
    num_sampled = sum(turn.num_tokens for turn in turns)
    logprobs = episode.sampled_logprobs[num_before : num_before + num_sampled]
    return Trajectory(
        identity=episode.plan.identity,
        tokens=torch.tensor(tokens, dtype=torch.int32),
        response_mask=response_mask,
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        turn_rewards=torch.tensor([turn.reward for turn in turns], dtype=torch.float32),
        policy_versions=torch.full((len(turns),), policy_version, dtype=torch.int32),
        termination=episode.termination,
        prompt_length=episode.prompt_length,
        tag=episode.plan.tag,
        extras=_extras(episode),
    )


def _extras(episode: Episode) -> dict[str, RowValue]:
    return {
        SUCCESS_EXTRA: torch.tensor(episode.is_success),
        OPTIMAL_LENGTH_EXTRA: torch.tensor(episode.optimal_length, dtype=torch.int32),
        NUM_INVALID_EXTRA: torch.tensor(episode.num_invalid_actions, dtype=torch.int32),
        LAYOUT_DIGEST_EXTRA: episode.layout_digest,
    }
