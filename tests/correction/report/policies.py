"""A policy over a few tokens, and steps that it sampled, for tests of what differs between rollout and training."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mock_scheduler.correction.report.scored_step import ScoredStep
from tests.batches import SAMPLING, make_row
from tests.correction.report.reports import make_batch
from tests.recording.builders import make_info

ROWS, LENGTH, CHOICES = 24, 16, 8


@dataclass(frozen=True)
class Policy:
    """A policy over 8 tokens that looks at the token before alone, so that histories need no model."""

    logits: torch.Tensor

    @classmethod
    def draw(cls, seed: int, *, scale: float = 1.5) -> Policy:
        generator = torch.Generator().manual_seed(seed)
        return cls(scale * torch.randn(CHOICES, CHOICES, generator=generator, dtype=torch.float64))

    def logprobs(self, before: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        return torch.log_softmax(self.logits[before] / temperature, dim=-1)

    def moved(self, seed: int, size: float) -> Policy:
        generator = torch.Generator().manual_seed(seed)
        return Policy(self.logits + size * torch.randn(CHOICES, CHOICES, generator=generator, dtype=torch.float64))


def sample(policy: Policy, *, seed: int = 7, temperature: float = 1.0) -> torch.Tensor:
    """Tokens ``[ROWS, LENGTH + 1]``, the first of each row its prompt."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, CHOICES, (ROWS, 1), generator=generator)
    for _ in range(LENGTH):
        probabilities = policy.logprobs(tokens[:, -1], temperature).exp()
        tokens = torch.cat((tokens, torch.multinomial(probabilities, 1, generator=generator)), dim=1)
    return tokens


def chosen(logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logprobs.gather(2, tokens[:, 1:, None])[..., 0]


def values(policy: Policy, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    return chosen(policy.logprobs(tokens[:, :-1], temperature), tokens)


def step_of(
    tokens: torch.Tensor, rollout: torch.Tensor, train: torch.Tensor, *, step: int = 0, lag: int = 0
) -> ScoredStep:
    rows = [
        replace(
            make_row(
                number // 4,
                number % 4,
                tokens=tokens[number].tolist(),
                response=[False] + [True] * LENGTH,
                rollout_logprobs=rollout[number].tolist(),
                turn_rewards=(float(number % 2),),
                prompt_length=1,
            ),
            policy_versions=torch.tensor([step - lag], dtype=torch.int32),
        )
        for number in range(ROWS)
    ]
    info = make_info(step, policy_version=step)
    return ScoredStep(info=info, batch=make_batch(rows, sampling=SAMPLING), train_logprobs=train.flatten())
