"""Plays the episodes of a block, and makes rows of a batch of them: one per episode, or per turn (``rollout_form``).

A turn samples tokens until one ends it, or until it has ``max_new_tokens``, or the sequence is full; the environment is
given its tokens. Episodes go on independently: one may sample the second token of a turn while another reads the next
observation. An episode whose turn the engine gave up ends there, aborted, with the tokens that it has.

Every row carries the extras ``success`` (bool), ``optimal_length`` and ``num_invalid_actions`` (int32), and
``layout_digest`` (text). Extras, tag and termination are the episode's on each of its rows: a turn's row says how the
whole episode ended, and the last turn has the largest ``identity.turn``.

Contract: requests to the sampler depend on the block's own episodes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch

from mock_scheduler.batch import Termination, Trajectory
from mock_scheduler.batch.columns import Ragged, RowValue
from mock_scheduler.batch.engine_columns import FINISH_REASONS_COLUMN, ROUTED_EXPERTS_COLUMN
from pipelines.batch_metrics import OPTIMAL_LENGTH_EXTRA, SUCCESS_EXTRA
from pipelines.environments.base import ResetRequest, ResetResult, StepResult
from pipelines.rollout.plan import Block, EpisodePlan
from pipelines.rollout.turns import Finish, OpenTurn, SampledTurn, TurnRules, TurnSampler


class Environments(Protocol):
    """Environments by slot, the episode's row in its block; ``EnvironmentPool`` is one."""

    def reset_many(self, requests: Sequence[ResetRequest]) -> list[ResetResult]:
        """Start these episodes."""
        ...

    def step_many(self, turns: Sequence[tuple[int, Sequence[int]]]) -> list[StepResult]:
        """Take these turns, each a slot and its sampled tokens."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Holds one turn of an episode, with ``tokens[start:stop]`` sampled."""

    start: int
    stop: int
    reward: float
    finish: Finish

    @property
    def num_tokens(self) -> int:
        """Returns sampled tokens."""
        return self.stop - self.start


@dataclass(kw_only=True, slots=True)
class Episode:
    """Holds an episode so far; ``sampled_logprobs``: of its sampled tokens, in order; ``turn_start``: of the last turn.

    ``routed_experts``: of its tokens but the last, as the engine told them.
    """

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
    routed_experts: torch.Tensor | None = None

    def start(self, start: ResetResult, rules: TurnRules) -> None:
        """Reads the first prompt; without room for an action after it, the episode ends truncated, with no turn."""
        self.optimal_length, self.layout_digest = start.optimal_length, start.layout_digest
        self._read(start.observation)
        self.prompt_length = len(self.tokens)
        if len(self.tokens) >= rules.sequence_length:
            self.termination = Termination.TRUNCATED

    @property
    def is_running(self) -> bool:
        """Whether another turn follows."""
        return self.termination is None

    @property
    def turn_tokens(self) -> list[int]:
        """Returns the tokens sampled in the last turn."""
        return self.tokens[self.turn_start :]

    def open_turn(self, row: int, rules: TurnRules) -> OpenTurn:
        """Asks for the next turn; the answer to the one before was heard."""
        return OpenTurn(
            row=row,
            identity=self.plan.identity,
            number=len(self.turns),
            history=self.tokens,
            room=rules.room(self.tokens),
        )

    def say(self, turn: SampledTurn) -> None:
        """Takes a sampled turn."""
        self.tokens.extend(turn.tokens)
        self.sampled_logprobs.extend(turn.logprobs)
        self.routed_experts = turn.routed_experts
        if turn.finish == "abort":
            self.termination = Termination.ABORTED
            if turn.tokens:
                self._end_turn(0.0, turn.finish)

    def hear(self, answer: StepResult, finish: Finish, rules: TurnRules) -> None:
        """Ends the turn with the environment's answer, and reads it if the sequence has room for another action."""
        self._end_turn(answer.reward, finish)
        self.num_invalid_actions += not answer.is_valid
        self.is_success = self.is_success or answer.is_success
        if answer.terminated:
            self.termination = Termination.TERMINATED
        elif answer.truncated or len(self.tokens) + len(answer.observation) >= rules.sequence_length:
            self.termination = Termination.TRUNCATED
        else:
            self._read(answer.observation)

    def _end_turn(self, reward: float, finish: Finish) -> None:
        self.turns.append(Turn(start=self.turn_start, stop=len(self.tokens), reward=reward, finish=finish))

    def _read(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self.turn_start = len(self.tokens)


def play_block(block: Block, environments: Environments, sample: TurnSampler, *, rules: TurnRules) -> list[Episode]:
    """Plays all episodes of a block to their end and returns them in the given order."""
    episodes = [Episode(plan=plan) for plan in block]
    requests = [
        ResetRequest(slot=row, tag=plan.tag, seed=plan.seed, split=plan.split) for row, plan in enumerate(block)
    ]
    for episode, start in zip(episodes, environments.reset_many(requests), strict=True):
        episode.start(start, rules)
    running = {row: episode.open_turn(row, rules) for row, episode in enumerate(episodes) if episode.is_running}
    while running:
        ended = sample(list(running.values()))
        for turn in ended:
            episodes[turn.row].say(turn)
        answered = [turn for turn in ended if episodes[turn.row].is_running]
        if answered:
            answers = environments.step_many([(turn.row, episodes[turn.row].turn_tokens) for turn in answered])
            for turn, answer in zip(answered, answers, strict=True):
                episodes[turn.row].hear(answer, turn.finish, rules)
        for turn in ended:
            if episodes[turn.row].is_running:
                running[turn.row] = episodes[turn.row].open_turn(turn.row, rules)
            else:
                del running[turn.row]
    return episodes


NUM_INVALID_EXTRA = "num_invalid_actions"
LAYOUT_DIGEST_EXTRA = "layout_digest"

RolloutForm = Literal["trajectory", "step"]


def episode_rows(
    episode: Episode,
    form: RolloutForm,
    *,
    policy_version: int,
    no_experts: torch.Tensor | None = None,
    says_finish: bool = False,
) -> list[Trajectory]:
    """Makes the rows of a finished episode, in the order of its turns; without a turn, one row of its prompt.

    ``trajectory``: all tokens in one row. ``step``: a row per turn, of all tokens up to the turn's last sampled one;
    the row's prompt is everything before the turn's own tokens. Raises ``RuntimeError`` for an unfinished episode.
    ``no_experts``: the routing of a row of which the engine told none; ``None``: rows have no such field.
    ``says_finish``: rows have the field ``finish_reasons``, of each turn.
    """
    whole = _row(episode, episode.turns, policy_version=policy_version, no_experts=no_experts, says_finish=says_finish)
    if form == "trajectory" or not episode.turns:
        return [whole]
    return [
        replace(
            _row(episode, [turn], policy_version=policy_version, no_experts=no_experts, says_finish=says_finish),
            identity=replace(episode.plan.identity, turn=number),
            prompt_length=turn.start,
        )
        for number, turn in enumerate(episode.turns)
    ]


def _row(
    episode: Episode,
    turns: Sequence[Turn],
    *,
    policy_version: int,
    no_experts: torch.Tensor | None,
    says_finish: bool,
) -> Trajectory:
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
        extras=_extras(episode)
        | _routing(episode, len(tokens), no_experts)
        | (_finish_reasons(episode, turns) if says_finish else {}),
    )


def _finish_reasons(episode: Episode, turns: Sequence[Turn]) -> dict[str, RowValue]:
    """One for each turn; of an episode that was given up before its first token, the reason itself."""
    gave_up = not turns and episode.termination is Termination.ABORTED
    return {FINISH_REASONS_COLUMN: "abort" if gave_up else [turn.finish for turn in turns]}


def _routing(episode: Episode, num_tokens: int, no_experts: torch.Tensor | None) -> dict[str, RowValue]:
    """The experts of a row's tokens: of all but the last, which nobody has read when it is sampled."""
    if no_experts is None:
        return {}
    experts = no_experts if episode.routed_experts is None else episode.routed_experts[: num_tokens - 1]
    return {ROUTED_EXPERTS_COLUMN: Ragged(experts)}


def _extras(episode: Episode) -> dict[str, RowValue]:
    return {
        SUCCESS_EXTRA: torch.tensor(episode.is_success),
        OPTIMAL_LENGTH_EXTRA: torch.tensor(episode.optimal_length, dtype=torch.int32),
        NUM_INVALID_EXTRA: torch.tensor(episode.num_invalid_actions, dtype=torch.int32),
        LAYOUT_DIGEST_EXTRA: episode.layout_digest,
    }
