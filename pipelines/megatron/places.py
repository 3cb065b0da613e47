"""Cuts a rank's share out of micro-batches, with its attention mask, and puts the ranks' results together again.

Context parallelism splits a line of T tokens into 2 · cp pieces; rank r holds the r-th from either end (Megatron's
zigzag order, ``get_batch_on_this_cp_rank``), so all ranks have as much to attend to. Results are added in the
micro-batches' canonical order, so pp and dp change no bit of a metric; the shares of cp ranks are added first, in their
order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipelines.batching.plan import MicroBatch
from pipelines.megatron.process_of_rank import Runtime


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInputs:
    """Holds the arguments of one forward pass on this rank.

    tokens, positions, row_ids: int64 ``[b, s]``; s is the rank's share of the line. attention_mask: bool ``[b, 1, s,
    k]``, True where a key is not seen; ``None`` where the layers' own causal mask and positions from 0 suffice. k is
    the number of keys before attention: the whole line, in the order of the gathered cp ranks.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    row_ids: torch.Tensor
    attention_mask: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnBatch:
    """A micro-batch as one rank holds it: the model's inputs, and targets, masks and values of its own tokens.

    ``columns``: int64 ``[s]``, the places of these columns in the line; ``None`` where they are all of it.
    """

    batch: MicroBatch
    inputs: ModelInputs
    columns: torch.Tensor | None = None

    @property
    def index(self) -> int:
        """Returns the micro-batch's number within the step."""
        return self.batch.index

    @property
    def row_ids(self) -> torch.Tensor:
        """int64 ``[b, s]``, as ``MicroBatch`` has them."""
        return self.batch.row_ids

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[b, s]``, as ``MicroBatch`` has them."""
        return self.batch.positions

    @property
    def response_mask(self) -> torch.Tensor:
        """bool ``[b, s]``, as ``MicroBatch`` has it."""
        return self.batch.response_mask


def context_columns(length: int, *, cp_rank: int, cp_size: int) -> torch.Tensor:
    """int64 ``[length / cp]``: the columns of a line that a cp rank holds, in its order."""
    pieces = torch.arange(length).chunk(2 * cp_size)
    return torch.cat((pieces[cp_rank], pieces[2 * cp_size - 1 - cp_rank]))


def row_mask(
    query_rows: torch.Tensor, query_positions: torch.Tensor, key_rows: torch.Tensor, key_positions: torch.Tensor
) -> torch.Tensor:
    """bool ``[b, 1, s, k]``: True where a key is of another row or later than the query.

    Queries: int64 ``[b, s]``; keys: int64 ``[b, k]``. Padding (row -1, position 0) sees padding, so that no query is
    left without a key.
    """
    same_row = query_rows.unsqueeze(2) == key_rows.unsqueeze(1)
    not_later = key_positions.unsqueeze(1) <= query_positions.unsqueeze(2)
    return ~(same_row & not_later).unsqueeze(1)


def own_batch(batch: MicroBatch, runtime: Runtime) -> OwnBatch:
    """Returns this rank's share of a micro-batch, on its device, with the mask that attention needs."""
    is_plain = batch.is_plain  # asked on the host, where it waits for nothing
    batch = batch.to(runtime.device)
    if runtime.cp_size == 1:
        mask = None
        if not is_plain:
            mask = row_mask(batch.row_ids, batch.positions, batch.row_ids, batch.positions)
        return OwnBatch(batch=batch, inputs=_inputs(batch, mask))
    columns = [
        context_columns(batch.tokens.shape[1], cp_rank=rank, cp_size=runtime.cp_size).to(runtime.device)
        for rank in range(runtime.cp_size)
    ]
    return share_of_columns(batch, columns[runtime.cp_rank], key_columns=torch.cat(columns))


def share_of_columns(batch: MicroBatch, own: torch.Tensor, *, key_columns: torch.Tensor) -> OwnBatch:
    """Takes some columns of a micro-batch; each of their tokens sees those of ``key_columns`` that its row has."""
    mask = row_mask(
        batch.row_ids[:, own],
        batch.positions[:, own],
        batch.row_ids[:, key_columns],
        batch.positions[:, key_columns],
    )
    share = of_columns(batch, own)
    return OwnBatch(batch=share, inputs=_inputs(share, mask), columns=own)


def of_columns(batch: MicroBatch, columns: torch.Tensor) -> MicroBatch:
    """Takes columns of a micro-batch, int64 ``[n]``, in this order."""
    cut: dict[str, Any] = {name: value[:, columns] for name, value in batch.tensors().items()}
    return replace(batch, **cut)


def _inputs(batch: MicroBatch, mask: torch.Tensor | None) -> ModelInputs:
    positions = batch.positions
    if mask is None:
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    return ModelInputs(tokens=batch.tokens, positions=positions, row_ids=batch.row_ids, attention_mask=mask)


def exchange_rows(
    micro_batches: Sequence[MicroBatch],
    own_rows: Mapping[int, torch.Tensor],
    runtime: Runtime,
    *,
    width: int,
    cp_size: int,
    own_cp_ranks: slice,
) -> np.ndarray:
    """Gathers rows of numbers of every micro-batch and cp rank, float64 ``[len(micro_batches), cp, width]``, on every
    rank.

    own_rows: ``[width]``, or one row for each of the own cp ranks, by micro-batch index, computed by this rank; empty
    off the last stage. The tp ranks hold them alike, and the first speaks. Collective.
    """
    places = {batch.index: place for place, batch in enumerate(micro_batches)}
    table = torch.zeros(len(micro_batches), cp_size, width, dtype=torch.float64, device=runtime.device)
    if runtime.tp_rank == 0:
        for index, row in own_rows.items():
            table[places[index], own_cp_ranks] = row
    dist.all_reduce(table)  # each row is one rank's; all others add 0
    return table.cpu().numpy()


def exchange_tokens(
    micro_batches: Sequence[MicroBatch],
    owned: Mapping[int, OwnBatch],
    own_values: Mapping[int, torch.Tensor],
    runtime: Runtime,
) -> dict[int, torch.Tensor]:
    """Gathers token values of every micro-batch, float64 ``[b, T]`` by index, on the host of every rank.

    own_values: ``[b, s]`` by index, of this rank's tokens; empty off the last stage. Collective.
    """
    sizes = [batch.tokens.numel() for batch in micro_batches]
    table = torch.zeros(sum(sizes), dtype=torch.float64, device=runtime.device)
    for batch, part in zip(micro_batches, table.split(sizes), strict=True):
        if runtime.tp_rank == 0 and batch.index in own_values:
            lines, columns = part.view(batch.tokens.shape), owned[batch.index].columns
            lines[:, slice(None) if columns is None else columns] = own_values[batch.index].detach().double()
    dist.all_reduce(table)  # each value is one rank's; all others add 0
    parts = table.cpu().split(sizes)
    return {batch.index: part.view(batch.tokens.shape) for batch, part in zip(micro_batches, parts, strict=True)}
