"""The tokens of a forward pass, in the terms of all instruments: which row each one is of, and where in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class MicroBatchTokens(Protocol):
    """The tokens that this rank gives a model chunk in one forward pass, ``[b, s]`` with padding.

    index: the micro-batch's number within the step, the same in every layout and on every chunk. row_ids: int64, the
    row's number in the step's rows; -1 on padding. positions: int64, the position within the row; 0 on padding.
    response_mask: bool, True where the next token of the row is a response token. Under context parallelism s is this
    rank's share of the line, in its order.
    """

    @property
    def index(self) -> int: ...  # noqa: D102 - as the class says
    @property
    def row_ids(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def positions(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def response_mask(self) -> torch.Tensor: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenBatch:
    """A ``MicroBatchTokens`` by itself."""

    index: int
    row_ids: torch.Tensor
    positions: torch.Tensor
    response_mask: torch.Tensor
