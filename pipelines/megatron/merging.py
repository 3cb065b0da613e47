"""Puts what ranks computed of a step's micro-batches together on every rank.

Sums are added in the micro-batches' canonical order, so that pp and dp change no bit of a metric; the shares of cp
ranks are added first, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from pipelines.megatron.places import OwnBatch
from pipelines.megatron.process.runtime import Runtime
from pipelines.micro_batches import MicroBatch


def exchange_rows(
    micro_batches: Sequence[MicroBatch],
    own_rows: Mapping[int, torch.Tensor],
    runtime: Runtime,
    *,
    width: int,
    emulated_shares: int = 1,
) -> np.ndarray:
    """Rows of numbers of every micro-batch and cp rank, float64 ``[len(micro_batches), cp, width]``, on every rank.

    own_rows: ``[width]`` by micro-batch index, of those that this rank computed; empty off the last stage. The tp
    ranks hold them alike, and the first speaks. emulated_shares: of how many cp ranks one process has rows,
    ``[emulated_shares, width]`` each. Collective.
    """
    places = {batch.index: place for place, batch in enumerate(micro_batches)}
    num_shares = max(runtime.cp_size, emulated_shares)
    table = torch.zeros(len(micro_batches), num_shares, width, dtype=torch.float64, device=runtime.device)
    if runtime.tp_rank == 0:
        for index, row in own_rows.items():
            table[places[index], slice(None) if emulated_shares > 1 else runtime.cp_rank] = row
    dist.all_reduce(table)  # each row is one rank's; all others add 0
    return table.cpu().numpy()


def exchange_tokens(
    micro_batches: Sequence[MicroBatch],
    owned: Mapping[int, OwnBatch],
    own_values: Mapping[int, torch.Tensor],
    runtime: Runtime,
) -> dict[int, torch.Tensor]:
    """Token values of every micro-batch, float64 ``[b, T]`` by index, on the host of every rank.

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
