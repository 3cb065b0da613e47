"""Describes a step's tokens and rows to all instruments: a forward pass's tokens, and the rows met so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import ROW_PLACES, RowTable, virtual_start


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
    """Holds a ``MicroBatchTokens`` by itself."""

    index: int
    row_ids: torch.Tensor
    positions: torch.Tensor
    response_mask: torch.Tensor


class MetRows:
    """The rows of one replica in one step, in the order in which it met them; a row's number is its place here."""

    def __init__(self) -> None:
        self.identities: list[str] = []
        self.lengths: list[int] = []
        self.starts: list[int] = []
        self._numbers: dict[str, int] = {}

    def add(self, identity: str, length: int) -> int:
        """Gives a row's number; a row that is known keeps its own.

        Raises:
            TraceError: it was met with another length, or is longer than a place has room for.
        """
        if length > ROW_PLACES:
            raise TraceError(f"row {identity} has {length} tokens; a trace has room for {ROW_PLACES} of a row")
        number = self._numbers.setdefault(identity, len(self.identities))
        if number == len(self.identities):
            self.identities.append(identity)
            self.lengths.append(length)
            self.starts.append(virtual_start(identity))
        elif self.lengths[number] != length:
            raise TraceError(
                f"row {identity} has {self.lengths[number]} tokens in one forward pass of a step and {length} in "
                "another: give each row an id of its own (run.step(number, rows=...))"
            )
        return number

    def __len__(self) -> int:
        return len(self.identities)

    def table(self) -> RowTable:
        """The rows met so far, as a trace has them."""
        return RowTable(identities=tuple(self.identities), lengths=tuple(self.lengths), starts=tuple(self.starts))
