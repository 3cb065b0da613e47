"""Adds up each router's losses and counts over an update, and makes metrics of the sums of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipelines.batching.plan import MicroBatch
from pipelines.config.model import ModelConfig
from pipelines.config.training import TrainingConfig
from pipelines.megatron.layers.routing import RoutingTable
from pipelines.megatron.process_of_rank import Runtime


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSums:
    """The sums of one router over an update; this rank's own part until ``all_reduce_router_sums`` completes it.

    load_balancing, z: float64 ``[]``: the sums of ``expert_router``'s docstring without their coefficients, 0 where the
    coefficient is; divided by the response tokens they are Megatron's ``load_balancing_loss`` (1 when balanced) and
    ``z_loss``. tokens_per_expert: float64 ``[E]``: real tokens sent to each expert.
    """

    load_balancing: torch.Tensor
    z: torch.Tensor
    tokens_per_expert: torch.Tensor


class RouterLedger:
    """Counts for the routers of a model in passes with a gradient, and tells them each row's weight.

    ``routing``: the table that they record into or choose by; ``None``: every router chooses for itself.
    """

    def __init__(self) -> None:
        self.routing: RoutingTable | None = None
        self._row_weights: torch.Tensor | None = None
        self._sums: dict[int, dict[int, torch.Tensor]] = {}

    def start_step(self, row_weights: torch.Tensor) -> None:
        """Begin a step whose row ids run from 0 to ``len(row_weights) - 1``.

        row_weights: ``[rows]``, integer or floating, on the compute device: the response tokens of each row.
        """
        self._row_weights = row_weights.double()

    @contextmanager
    def using(self, routing: RoutingTable | None) -> Iterator[None]:
        """Has the routers use another table, or none, in the block."""
        before, self.routing = self.routing, routing
        try:
            yield
        finally:
            self.routing = before

    @property
    def row_weights(self) -> torch.Tensor:
        """Returns float64 ``[rows]``.

        Raises:
            RuntimeError: no step was begun.
        """
        if self._row_weights is None:
            raise RuntimeError("a router with losses ran before RouterLedger.start_step gave the rows' weights")
        return self._row_weights

    def add(
        self,
        layer: int,
        load_balancing: torch.Tensor,
        z: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        *,
        rank: int = 0,
    ) -> None:
        """Adds the sums of one pass through the router of ``layer`` (from 0); no gradient is kept.

        rank: of these tokens, where one process has those of several; the ranks' sums are added in their order.
        """
        losses = torch.stack((load_balancing, z)).detach().double()
        row = torch.cat((losses, tokens_per_expert.double()))
        by_rank = self._sums.setdefault(layer, {})
        by_rank[rank] = by_rank[rank] + row if rank in by_rank else row

    def take(self) -> dict[int, RouterSums]:
        """The sums by layer (from 0, as in ``decoder.layers.N``) since the last call, of this rank's tokens alone."""
        taken, self._sums = self._sums, {}
        return {layer: _router_sums(_added_by_rank(rows)) for layer, rows in sorted(taken.items())}


def _added_by_rank(rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
    first, *others = (row for _, row in sorted(rows.items()))
    total = first
    for row in others:
        total = total + row
    return total


def _router_sums(row: torch.Tensor) -> RouterSums:
    return RouterSums(load_balancing=row[0], z=row[1], tokens_per_expert=row[2:])


def all_reduce_router_sums(
    sums: dict[int, RouterSums], model: ModelConfig, *, device: torch.device
) -> dict[int, RouterSums]:
    """The sums over all ranks, of every layer with experts. Collective: every rank must call it."""
    table = torch.zeros(model.num_layers, 2 + (model.num_moe_experts or 0), dtype=torch.float64, device=device)
    for layer, own in sums.items():
        table[layer] = torch.cat((own.load_balancing.view(1), own.z.view(1), own.tokens_per_expert))
    dist.all_reduce(table)
    return {layer: _router_sums(table[layer]) for layer, has_experts in enumerate(model.moe_layers) if has_experts}


def router_weight(micro_batches: Sequence[MicroBatch], training: TrainingConfig, *, num_tokens: float) -> float:
    """Returns the divisor of the routers' losses of an update: its response tokens, or micro-batches with rows."""
    if training.calculate_per_token_loss:
        return num_tokens
    return float(sum(batch.num_real_tokens > 0 for batch in micro_batches))


def merge_router_sums(
    ledger: RouterLedger, model: ModelConfig, runtime: Runtime, *, total_weight: float
) -> dict[str, float]:
    """Makes metrics of the routers since the last call, over all ranks; empty for a model without experts. Collective.

    ``moe/load_balancing_loss`` and ``moe/z_loss``: means over layers and, weighted as the loss weighs them, over the
    update, without their coefficients; only where the coefficient is above 0. ``total_weight``: as ``router_weight``.
    ``moe/max_expert_load``: the largest share of one expert in a layer's tokens, times the number of experts (1 when
    balanced). ``moe/routed_tokens``: sent tokens times experts, over all layers. Megatron's own router keeps no such
    ledger: nothing is logged.
    """
    if model.num_moe_experts is None or model.moe_router_impl == "megatron":
        return {}
    sums = all_reduce_router_sums(ledger.take(), model, device=runtime.device)
    layers = [sums[layer] for layer in sorted(sums)]
    totals = [float(layer.tokens_per_expert.sum()) for layer in layers]
    loads = [
        float(layer.tokens_per_expert.max()) * model.num_moe_experts / max(total, 1.0)
        for layer, total in zip(layers, totals, strict=True)
    ]
    metrics = {"moe/max_expert_load": max(loads), "moe/routed_tokens": sum(totals)}
    scale = 1.0 / (len(layers) * max(total_weight, 1.0))
    if model.moe_aux_loss_coeff > 0:
        metrics["moe/load_balancing_loss"] = sum(float(layer.load_balancing) for layer in layers) * scale
    if model.moe_z_loss_coeff > 0:
        metrics["moe/z_loss"] = sum(float(layer.z) for layer in layers) * scale
    return metrics
