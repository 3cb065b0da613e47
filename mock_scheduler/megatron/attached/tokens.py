"""Says which tokens each counted forward pass of a chunk computes, on any pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.megatron.attached.hooks import CallInputs
from mock_scheduler.megatron.attached.row_exchange import MicroBatchRows, RowExchange, name_found
from mock_scheduler.megatron.attached.row_finding import FoundRows, Ints, find_rows, name_row, read_bounds, slice_call
from mock_scheduler.megatron.ranks import ModelRanks
from mock_scheduler.megatron.step_tokens import MetRows, TokenBatch


class TokenFinder:
    """Finds the tokens of one step's micro-batches, on one rank.

    step: its number. ids: the caller's, of this replica's rows; ``None``: rows are known by their tokens.
    ``rows``: those met so far.
    """

    def __init__(
        self,
        exchange: RowExchange,
        ranks: ModelRanks,
        *,
        step: int,
        ids: Sequence[str] | None,
        pad_token_id: int | None,
    ) -> None:
        self.rows = MetRows()
        self._exchange = exchange
        self._ranks = ranks
        self._step = step
        self._ids = ids
        self._num_ids_used = 0
        self._pad_token_id = pad_token_id
        self._update = 0
        #: By their numbers within the update; micro-batches of earlier updates of the step come before.
        self._batches: dict[int, TokenBatch] = {}
        self._num_earlier = 0
        self._shown: dict[str, set[int]] = {}

    @property
    def batches(self) -> list[TokenBatch]:
        """Returns this rank's micro-batches of the update under way."""
        return [self._batches[number] for number in sorted(self._batches)]

    def find(self, number: int, call: CallInputs, *, has_embedding: bool) -> TokenBatch:
        """Gives the tokens of a chunk's pass over the update's micro-batch ``number``.

        Raises:
            TraceError: the call has no tokens where it must, or they make no rows.
        """
        if number not in self._batches:
            rows = self._find_rows(f"{self._step}/{self._update}/{number}", call, has_embedding=has_embedding)
            self._batches[number] = self._number_rows(number, rows)
        return self._batches[number]

    def take_new(self, name: str, batch: TokenBatch) -> TokenBatch | None:
        """Gives the part of a micro-batch with rows whose input ``name`` was not taken; ``None`` where there is none.

        An update may train again on rows of an earlier one. A step's inputs are traced once.
        """
        shown = self._shown.setdefault(name, set())
        new = {int(row) for row in batch.row_ids.unique().tolist() if row >= 0} - shown
        if not new:
            return None
        shown |= new
        is_new = torch.isin(batch.row_ids, torch.tensor(sorted(new), device=batch.row_ids.device))
        return TokenBatch(
            index=batch.index,
            row_ids=torch.where(is_new, batch.row_ids, -1),
            positions=torch.where(is_new, batch.positions, 0),
            response_mask=batch.response_mask & is_new,
        )

    def end_update(self) -> None:
        """Ends an update: the next pass is of the next one."""
        self._exchange.end_update()
        self._num_earlier += len(self._batches)
        self._batches.clear()
        self._update += 1
        if self._ids is not None and self._num_ids_used == len(self._ids):
            self._num_ids_used = 0

    def check_ids(self) -> None:
        """Refuses ids that no forward pass had a row for; at the end of a step.

        Raises:
            TraceError: with both numbers.
        """
        if self._ids is not None and self._num_ids_used and self.is_naming:
            raise TraceError(
                f"run.step({self._step}, rows=...) gave {len(self._ids)} ids, but the last update's forward passes met "
                f"{self._num_ids_used} rows: give one id for each row of this replica, in their order"
            )

    @property
    def is_naming(self) -> bool:
        """Whether this rank names rows: on the first stage at tp 0 and cp 0."""
        ranks = self._ranks
        return ranks.is_first_stage and ranks.tp_rank == 0 and ranks.cp_rank == 0

    def _find_rows(self, key: str, call: CallInputs, *, has_embedding: bool) -> MicroBatchRows:
        ranks = self._ranks
        if not (ranks.is_first_stage and has_embedding and ranks.tp_rank == 0):
            rows = self._exchange.ask(key)
            self._check_shape(call, rows)
            return rows
        if call.tokens is None:
            raise TraceError(
                "the first pipeline stage's model was called without input_ids of shape [b, s], so its tokens are of "
                "unknown rows: attach follows GPTModel.forward(input_ids, position_ids, ...)"
            )
        positions = None if call.positions is None else _host(call.positions)
        own = slice_call(
            _host(call.tokens), positions, read_bounds(call.packed), cp_rank=ranks.cp_rank, cp_size=ranks.cp_size
        )
        found = find_rows(own, self._exchange.gather_slices(key, own), pad_token_id=self._pad_token_id)
        names = self._exchange.name_rows(key, f"{self._step}/{self._update}", self._own_names(found))
        rows = name_found(found, names)
        self._exchange.tell(key, rows)
        return rows

    def _own_names(self, found: FoundRows) -> list[str]:
        if self._ids is None:
            return [name_row(row) for row in found.rows]
        first, self._num_ids_used = self._num_ids_used, self._num_ids_used + len(found.rows)
        if self._num_ids_used > len(self._ids):
            raise TraceError(
                f"run.step({self._step}, rows=...) gave {len(self._ids)} ids, but the update's forward passes met more "
                "rows: give one id for each row of this replica, in their order"
            )
        return list(self._ids[first : self._num_ids_used])

    def _check_shape(self, call: CallInputs, rows: MicroBatchRows) -> None:
        if call.tokens is not None and tuple(call.tokens.shape) != rows.numbers.shape:
            raise TraceError(
                f"this rank's model was called with tokens of shape {list(call.tokens.shape)}, the first stage's with "
                f"{list(rows.numbers.shape)}: they are not the same micro-batch"
            )

    def _number_rows(self, number: int, rows: MicroBatchRows) -> TokenBatch:
        numbers = np.array([self.rows.add(*row) for row in zip(rows.names, rows.lengths, strict=True)], dtype=np.int64)
        is_token = rows.numbers >= 0
        row_ids = np.full(rows.numbers.shape, -1, dtype=np.int64)
        row_ids[is_token] = numbers[rows.numbers[is_token]]
        device = self._ranks.device
        return TokenBatch(
            index=self._num_earlier + number,
            row_ids=torch.from_numpy(row_ids).to(device),
            positions=torch.from_numpy(rows.positions.copy()).to(device),
            response_mask=torch.from_numpy(is_token).to(device),
        )


def _host(tensor: torch.Tensor) -> Ints:
    return np.asarray(tensor.cpu().numpy(), dtype=np.int64)
