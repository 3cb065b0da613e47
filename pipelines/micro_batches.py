"""The global batch cut into updates and micro-batches, before any layout is known.

Rows keep the batch's canonical order: update u of a step holds rows [u·G, (u+1)·G), micro-batch m of it rows
[m·b, (m+1)·b). A data-parallel rank computes the micro-batches m with m mod dp = its rank; which rows are in one,
their padding and the loss denominator never depend on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mock_scheduler.batch import RolloutBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Padded rows, shifted so that position t predicts token t + 1.

    tokens: int64 ``[b, T]``; targets: int64 ``[b, T]``, the next token (0 at the end of a row); response_mask: bool
    ``[b, T]``, True where the target is a response token; advantages and rollout_logprobs (the target's, as sampled):
    float32 ``[b, T]``, 0 elsewhere.
    """

    index: int
    tokens: torch.Tensor
    targets: torch.Tensor
    response_mask: torch.Tensor
    advantages: torch.Tensor
    rollout_logprobs: torch.Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same with every tensor on a device."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            targets=self.targets.to(device),
            response_mask=self.response_mask.to(device),
            advantages=self.advantages.to(device),
            rollout_logprobs=self.rollout_logprobs.to(device),
        )


def padded_length(batch: RolloutBatch, *, multiple_of: int) -> int:
    """The longest row of the whole batch, rounded up; the same on every rank."""
    longest = max(int(batch.lengths.max()), 1)
    return -(-longest // multiple_of) * multiple_of


def build_micro_batches(
    batch: RolloutBatch, advantages: torch.Tensor, *, micro_batch_size: int, multiple_of: int
) -> list[MicroBatch]:
    """All micro-batches of a step on the host, in canonical order; ``advantages``: floating ``[B]``, one per row."""
    padded = batch.pad(padded_length(batch, multiple_of=multiple_of))
    targets = _shift_left(padded.tokens)
    response_mask = _shift_left(padded.response_mask)
    rollout_logprobs = _shift_left(padded.rollout_logprobs)
    token_advantages = torch.where(response_mask, advantages.float().unsqueeze(1), 0.0)
    return [
        MicroBatch(
            index=index,
            tokens=padded.tokens[rows],
            targets=targets[rows],
            response_mask=response_mask[rows],
            advantages=token_advantages[rows],
            rollout_logprobs=rollout_logprobs[rows],
        )
        for index, rows in enumerate(torch.arange(len(batch)).split(micro_batch_size))
    ]


def _shift_left(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor[:, 1:], torch.zeros_like(tensor[:, :1])), dim=1)
