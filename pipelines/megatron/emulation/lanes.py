"""Computes micro-batches of virtual replicas side by side in one pass.

Where an expert sees the tokens of several replicas at once, their micro-batches are the columns of one line after
another's; every module but the experts cuts them apart again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mock_scheduler.errors import LayoutError
from mock_scheduler.megatron.emulation.parts import cut, cut_graph
from pipelines.megatron.places import ModelInputs, OwnBatch

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
    """Each micro-batch with its columns of ``[b, s, ...]``, without graph and in memory of their own."""
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
