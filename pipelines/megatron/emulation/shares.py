"""Cuts a micro-batch into the shares of emulated cp ranks, and adds the losses of these shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mock_scheduler.megatron.emulation.parts import cut_graph
from pipelines.batching.plan import MicroBatch
from pipelines.megatron.places import OwnBatch, context_columns, of_columns, share_of_columns

ShareSums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A share's loss, number of tokens and metrics."""


def gathered_shares(own: OwnBatch, num_shares: int) -> OwnBatch:
    """A whole line's tokens in the order of the emulated cp ranks, with the mask that attention needs."""
    if num_shares == 1:
        return own
    length = own.batch.tokens.shape[1]
    columns = torch.cat([context_columns(length, cp_rank=rank, cp_size=num_shares) for rank in range(num_shares)])
    gathered = columns.to(own.batch.tokens.device)
    return share_of_columns(own.batch, gathered, key_columns=gathered)


def cut_shares(own: OwnBatch, num_shares: int) -> list[MicroBatch]:
    """Cuts a batch into the emulated cp ranks' targets and values, without inputs."""
    if num_shares == 1:
        return [own.batch]
    columns = torch.arange(own.batch.tokens.shape[1], device=own.batch.tokens.device)
    return [of_columns(own.batch, part) for part in columns.chunk(num_shares)]


def cut_values(values: Mapping[str, torch.Tensor], num_shares: int) -> list[dict[str, torch.Tensor]]:
    """``[b, s]`` tensors by name as each share has them."""
    parts = {name: cut_graph(tensor, 1, num_shares) for name, tensor in values.items()}
    return [{name: of_shares[share] for name, of_shares in parts.items()} for share in range(num_shares)]


def joined_terms(terms: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The shares' ``[b, s]`` tensors by name, side by side."""
    return {name: torch.cat([of_share[name] for of_share in terms], dim=1) for name in terms[0]}


def sums_of_shares(sums: Sequence[ShareSums]) -> ShareSums:
    """Loss and tokens over all shares, each of whose losses has the gradient that it has alone; metrics ``[n, width]``.

    Of one share they are its own.
    """
    if len(sums) == 1:
        total, num_tokens, metrics = sums[0]
        return total, num_tokens.int(), metrics
    totals, counts, metrics_of = zip(*sums, strict=True)
    return torch.stack(totals).sum(), torch.stack(counts).sum().int(), torch.stack(metrics_of)
