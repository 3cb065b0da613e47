"""Plays many episodes turn by turn in lock-step: one forward pass per turn for all that are still running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from mock_scheduler.batch import SampleIdentity, Termination, Trajectory
from pipelines.environments.base import TokenEnvironment

SampleFunction = Callable[[Sequence[Sequence[int]], Sequence[float]], tuple[list[int], list[float]]]
"""From token prefixes and one number in [0, 1) each, to the next tokens and their log-probabilities."""

UniformFunction = Callable[[SampleIdentity, int], float]
"""The number that decides the token which an episode samples at a turn."""


@dataclass(kw_only=True, slots=True)
class Episode:
    """One running episode: its environment and everything that has been said so far."""

    identity: SampleIdentity
    tag: str
    environment: TokenEnvironment
    seed: int
    tokens: list[int] = field(default_factory=list)
    response_mask: list[bool] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    prompt_length: int = 0
    termination: Termination | None = None

    def start(self) -> None:
        """Reset the environment and read the first prompt."""
        self._read(self.environment.reset(self.seed))
        self.prompt_length = len(self.tokens)

    def act(self, token: int, rollout_logprob: float, *, sequence_length: int) -> None:
        """Take one sampled action and read what the environment answers, as far as the sequence has room."""
        self.tokens.append(token)
        self.response_mask.append(True)
        self.rollout_logprobs.append(rollout_logprob)
        result = self.environment.step(token)
        self.turn_rewards.append(result.reward)
        if result.terminated:
            self.termination = Termination.TERMINATED
        elif result.truncated or len(self.tokens) + len(result.observation) >= sequence_length:
            self.termination = Termination.TRUNCATED
        else:
            self._read(result.observation)

    def _read(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self.response_mask.extend([False] * len(tokens))

    def trajectory(self, policy_version: int) -> Trajectory:
        """The finished episode as one row of a batch."""
        if self.termination is None:
            raise RuntimeError(f"episode {self.identity} has not ended")
        return Trajectory(
            identity=self.identity,
            tokens=torch.tensor(self.tokens, dtype=torch.int32),
            response_mask=torch.tensor(self.response_mask, dtype=torch.bool),
            rollout_logprobs=torch.tensor(self.rollout_logprobs, dtype=torch.float32),
            turn_rewards=torch.tensor(self.turn_rewards, dtype=torch.float32),
            policy_versions=torch.full((len(self.turn_rewards),), policy_version, dtype=torch.int32),
            termination=self.termination,
            prompt_length=self.prompt_length,
            tag=self.tag,
        )


def play_episodes(
    episodes: Sequence[Episode],
    sample: SampleFunction,
    uniform: UniformFunction,
    *,
    sequence_length: int,
    policy_version: int,
) -> list[Trajectory]:
    """Play all episodes to their end and return them in the given order.

    A first prompt that leaves no room for an action ends its episode truncated, with no response token.
    """
    for episode in episodes:
        episode.start()
        if len(episode.tokens) >= sequence_length:
            episode.termination = Termination.TRUNCATED
    running = [episode for episode in episodes if episode.termination is None]
    turn = 0
    while running:
        uniforms = [uniform(episode.identity, turn) for episode in running]
        tokens, rollout_logprobs = sample([episode.tokens for episode in running], uniforms)
        for episode, token, rollout_logprob in zip(running, tokens, rollout_logprobs, strict=True):
            episode.act(token, rollout_logprob, sequence_length=sequence_length)
        running = [episode for episode in running if episode.termination is None]
        turn += 1
    return [episode.trajectory(policy_version) for episode in episodes]
