"""Keeps the number of the step under way, and what is known of its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mock_scheduler.megatron.attached.optimizer_hook import UpdateResult


@dataclass(kw_only=True, slots=True, eq=False)
class StepNotes:
    """One step: the number, and what it has shown so far.

    ids: the caller's, of this replica's rows. is_grouped: it is a block of ``run.step``, and has all updates in it.
    losses: by pass, sum and number of tokens, float64 on the model's device.
    """

    number: int
    is_grouped: bool = False
    ids: Sequence[str] | None = None
    results: list[UpdateResult] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)

    def add_loss(self, loss: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Notes the losses of one pass's tokens, of those with a mask that is not 0; computes no more than sums."""
        with torch.no_grad():
            kept = torch.ones_like(loss, dtype=torch.bool) if mask is None else mask != 0
            self.losses.append(torch.stack((loss.double()[kept].sum(), kept.sum().double())))

    def loss_sum(self) -> tuple[float, float]:
        """Sum and number of the losses of this rank's tokens."""
        # Exactly rounded, so the order of micro-batches does not show.
        sums = torch.stack(self.losses).tolist() if self.losses else []
        return math.fsum(total for total, _ in sums), math.fsum(count for _, count in sums)

    def metrics(self, losses: Sequence[tuple[float, float]]) -> dict[str, float]:
        """The step's metrics: means over its updates, the last learning rate, the mean loss of the ranks' tokens."""
        norms = [result.grad_norm for result in self.results if result.grad_norm is not None]
        rates = [result.learning_rate for result in self.results if result.learning_rate is not None]
        num_tokens = sum(count for _, count in losses)
        known: Mapping[str, float | None] = {
            "grad_norm": sum(norms) / len(norms) if norms else None,
            "lr": rates[-1] if rates else None,
            "lm_loss": math.fsum(total for total, _ in losses) / num_tokens if num_tokens else None,
            "num_updates": float(len(self.results)),
            "skipped_updates": float(sum(not result.succeeded for result in self.results)),
        }
        return {name: value for name, value in known.items() if value is not None} | self.logged
