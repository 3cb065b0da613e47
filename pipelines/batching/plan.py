"""A rollout step as the optimizer sees it: updates, each of them micro-batches, all on the host.

Contract: plain data. Every tensor of a micro-batch has its shape ``[b, T]``: b lines of T columns. A line holds one
row, several rows one after another (packed), or nothing; the rest of it is padding. Column t of a row predicts the
row's next token, so a row's last column has no target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """The input of one forward and backward pass; all tensors but ``index`` are ``[b, T]``.

    - index: its number within the step, the same in every layout.
    - tokens, targets: int64; ``targets`` is the next token of the same row, 0 where there is none.
    - response_mask: bool, True where the target is a response token.
    - advantages, returns: float32 or float64, of the target; 0 where the mask is False.
    - rollout_logprobs: float32, the target's, as sampled; 0 where the mask is False.
    - weights: float32 or float64, the target's importance weight; 1 on response tokens without correction, 0 elsewhere.
    - kept_mask: bool, True where the target is a response token and correction does not reject it.
    - loss_weights: float32 or float64, the target's factor in the loss's sum; 1 on response tokens for ``token-mean``,
      0 where the mask is False.
    - row_ids: int64, the row's number in the step's batch; -1 on padding.
    - positions: int64, the position within the row; 0 on padding.
    """

    index: int
    tokens: torch.Tensor
    targets: torch.Tensor
    response_mask: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    rollout_logprobs: torch.Tensor
    weights: torch.Tensor
    kept_mask: torch.Tensor
    loss_weights: torch.Tensor
    row_ids: torch.Tensor
    positions: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns every tensor by its field's name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "index"}

    def to(self, device: torch.device) -> MicroBatch:
        """Returns the same with every tensor on a device."""
        return MicroBatch(index=self.index, **{name: value.to(device) for name, value in self.tensors().items()})

    @property
    def is_plain(self) -> bool:
        """Whether every line is one row from column 0, or empty: a causal mask and the columns as positions suffice.

        Reads the tensors, so it waits for the device where they are on one.
        """
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        is_one_row = (self.row_ids == self.row_ids[:, :1]) & (self.positions == columns)
        return bool((is_one_row | (self.row_ids < 0)).all())

    @property
    def num_tokens(self) -> int:
        """Counts the response tokens: the loss sums over them."""
        return int(self.response_mask.sum())

    @property
    def num_kept_tokens(self) -> int:
        """Response tokens that are not rejected."""
        return int(self.kept_mask.sum())

    @property
    def num_real_tokens(self) -> int:
        """Tokens that are no padding."""
        return int((self.row_ids >= 0).sum())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Update:
    """Holds the micro-batches of one optimizer update, in the order of its gradient sum; empty ones, if any, come last.

    A data-parallel rank of dp computes the micro-batches at positions p with p mod dp = its rank: by position, not by
    ``MicroBatch.index``, since the indices of one update need not start at a multiple of dp.
    """

    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepPlan:
    """All updates of one pass over a step's batch. row_weights: float64 ``[B]``, the response tokens of each row."""

    updates: tuple[Update, ...]
    row_weights: torch.Tensor

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """Lists the micro-batches of all updates, in order; empty ones have larger indices than all others."""
        return tuple(micro_batch for update in self.updates for micro_batch in update.micro_batches)


def has_kept_tokens(micro_batches: Sequence[MicroBatch]) -> bool:
    """Whether any response token of these micro-batches is kept by correction."""
    return any(bool((batch.kept_mask & batch.response_mask).any()) for batch in micro_batches)
