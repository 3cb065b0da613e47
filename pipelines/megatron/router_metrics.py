"""What the routers of a model did in one update, as metrics."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.config.model import ModelConfig
from pipelines.config.training import TrainingConfig
from pipelines.megatron.layers.expert_router import RouterLedger, all_reduce_router_sums
from pipelines.megatron.process.runtime import Runtime
from pipelines.micro_batches import MicroBatch


def router_weight(micro_batches: Sequence[MicroBatch], training: TrainingConfig, *, num_tokens: float) -> float:
    """What the routers' losses of an update are divided by: its response tokens, or micro-batches that have rows."""
    if training.calculate_per_token_loss:
        return num_tokens
    return float(sum(batch.num_real_tokens > 0 for batch in micro_batches))


def merge_router_sums(
    ledger: RouterLedger, model: ModelConfig, runtime: Runtime, *, total_weight: float
) -> dict[str, float]:
    """Metrics of the routers since the last call, over all ranks; empty for a model without experts. Collective.

    ``moe/load_balancing_loss`` and ``moe/z_loss``: means over layers and, weighted as the loss weighs them, over the
    update, without their coefficients; only where the coefficient is above 0. ``total_weight``: as ``router_weight``.
    ``moe/max_expert_load``: the largest share of a layer's tokens that one expert got, times the number of experts (1
    when balanced). ``moe/routed_tokens``: tokens times experts that were sent, over all layers. Megatron's own router
    keeps no such ledger: nothing is logged.
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
