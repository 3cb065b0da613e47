"""Computes micro-batches of virtual replicas side by side in one pass, and shares of emulated cp ranks one by one.

Where an expert sees the tokens of several replicas at once, their micro-batches are the columns of one line after
another's; every module but the experts cuts them apart again. The losses of a micro-batch's shares are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mock_scheduler.errors import LayoutError
from mock_scheduler.megatron.emulation.parts import cut, cut_graph
from pipelines.batching.plan import MicroBatch
from pipelines.megatron.places import ModelInputs, OwnBatch, context_columns, of_columns, share_of_columns

LaneSums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A micro-batch's loss, number of tokens and metrics; of a joint batch the metrics are stacked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JointBatch(OwnBatch):
    """Micro-batches of one shape, one for each replica that computes now; ``batch`` has the tensors of all."""

    parts: tuple[OwnBatch, ...]


def join_batches(batches: Sequence[OwnBatch], num_lanes: int) -> list[OwnBatch]:
    """The micro-batches of an update or more as they are computed, so many together.

    Raises:
        LayoutError: they are of different shapes, or not a multiple of so many.
    """
    if num_lanes == 1:
        return list(batches)
    if len(batches) % num_lanes:
        raise LayoutError(f"order.emulate: {len(batches)} micro-batches for {num_lanes} replicas that compute together")
    return [_join(batches[start : start + num_lanes]) for start in range(0, len(batches), num_lanes)]


def parts_of(own: OwnBatch) -> tuple[OwnBatch, ...]:
    """The micro-batches that a pass computes."""
    return own.parts if isinstance(own, JointBatch) else (own,)


def cut_lanes(own: OwnBatch, values: torch.Tensor) -> list[tuple[OwnBatch, torch.Tensor]]:
    """Returns each micro-batch with its columns of ``[b, s, ...]``, without graph and in memory of their own."""
    parts = parts_of(own)
    return list(zip(parts, cut(values, 1, len(parts)), strict=True))


def sums_of_lanes(own: OwnBatch, output: torch.Tensor, loss: Callable[[OwnBatch, torch.Tensor], LaneSums]) -> LaneSums:
    """Loss and tokens over all micro-batches, each of whose losses has the gradient that it has alone."""
    parts = parts_of(own)
    if len(parts) == 1:
        return loss(own, output)
    sums = [loss(*two) for two in zip(parts, cut_graph(output, 1, len(parts)), strict=True)]
    totals, counts, metrics = zip(*sums, strict=True)
    # Stacked, each loss gets the gradient 1; Megatron's schedule counts tokens in int32.
    return torch.stack(totals).sum(), torch.stack(counts).sum().int(), torch.stack(metrics)


def metrics_of_lanes(own: OwnBatch, metrics: torch.Tensor) -> dict[int, torch.Tensor]:
    """Gives the metrics of ``sums_of_lanes`` by micro-batch index."""
    parts = parts_of(own)
    rows = [metrics] if len(parts) == 1 else list(metrics)
    return {part.batch.index: row for part, row in zip(parts, rows, strict=True)}


def _join(parts: Sequence[OwnBatch]) -> JointBatch:
    shapes = {tuple(part.inputs.tokens.shape) for part in parts}
    if len(shapes) > 1:
        listed = ", ".join(str(list(shape)) for shape in sorted(shapes))
        raise LayoutError(
            f"order.emulate: replicas that compute together need micro-batches of one shape, found {listed}"
        )
    inputs = [part.inputs for part in parts]
    tensors = [part.batch.tensors() for part in parts]
    joined: dict[str, Any] = {name: torch.cat([one[name] for one in tensors], dim=1) for name in tensors[0]}
    return JointBatch(
        batch=replace(parts[0].batch, **joined),
        inputs=ModelInputs(
            tokens=torch.cat([one.tokens for one in inputs], dim=1),
            positions=torch.cat([one.positions for one in inputs], dim=1),
            row_ids=torch.cat([one.row_ids for one in inputs], dim=1),
            # Along the queries, where attention cuts it: each lane sees the keys of its own tokens.
            attention_mask=torch.cat([_mask(one) for one in inputs], dim=2),
        ),
        parts=tuple(parts),
    )


def _mask(inputs: ModelInputs) -> torch.Tensor:
    """The mask, or the one that layers make themselves where none is given."""
    if inputs.attention_mask is not None:
        return inputs.attention_mask
    num_lines, length = inputs.tokens.shape
    # True hides, as in Megatron: a token sees itself and those before it.
    unseen = torch.ones(length, length, dtype=torch.bool, device=inputs.tokens.device).triu(diagonal=1)
    return unseen.expand(num_lines, 1, length, length)


ShareSums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A share's loss, number of tokens and metrics."""


def gathered_shares(own: OwnBatch, num_shares: int) -> OwnBatch:
    """Returns a whole line's tokens in the order of the emulated cp ranks, with the mask that attention needs."""
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
    """Returns the shares' ``[b, s]`` tensors by name, side by side."""
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
