"""The loss of cp ranks that one process emulates: one for each share of a micro-batch's columns, then put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pipelines.megatron.emulation.parts import cut_graph

ShareSums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A share's loss, number of tokens and metrics."""


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
