"""Reads a built model and its gradient buffers as the rules about layouts and the order plan describe them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer

from mock_scheduler.config.instruments import OrderConfig
from mock_scheduler.config.layout import ParallelConfig

_PRECISIONS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltModel:
    """Holds a ``DescribedModel`` of a whole model in one process."""

    num_layers: int
    num_attention_heads: int
    query_groups: int
    ffn_size: int
    swiglu: bool
    add_bias_linear: bool
    qk_layernorm: bool
    untie_embeddings_and_output_weights: bool
    num_moe_experts: int | None
    moe_layers: tuple[bool, ...]
    expert_ffn_size: int
    moe_shared_expert_intermediate_size: int | None
    moe_shared_expert_gate: bool
    moe_router_load_balancing_type: str
    moe_aux_loss_coeff: float
    moe_z_loss_coeff: float
    # Modules say by their types whether they are followed, and the vocabulary is padded already.
    moe_router_impl: str = "megatron"
    transformer_impl: str = "local"
    make_vocab_size_divisible_by: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltTraining:
    """A ``DescribedTraining`` whose micro-batches are the training's own."""

    calculate_per_token_loss: bool
    use_distributed_optimizer: bool
    accumulate_allreduce_grads_in_fp32: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    has_token_budget: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltRun:
    """Holds a ``DescribedRun`` in one process."""

    order: OrderConfig
    precision: str
    model: BuiltModel
    training: BuiltTraining
    parallel: ParallelConfig


def describe_run(gpt: GPTModel, ddp_config: DistributedDataParallelConfig, order: OrderConfig) -> BuiltRun:
    """Describes a training of one process that is to follow another layout."""
    config = gpt.config
    return BuiltRun(
        order=order,
        precision=_PRECISIONS.get(config.params_dtype, str(config.params_dtype)),
        parallel=ParallelConfig(),
        model=BuiltModel(
            num_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            query_groups=config.num_query_groups or config.num_attention_heads,
            ffn_size=config.ffn_hidden_size,
            swiglu=config.gated_linear_unit,
            add_bias_linear=config.add_bias_linear,
            qk_layernorm=config.qk_layernorm,
            untie_embeddings_and_output_weights=not gpt.share_embeddings_and_output_weights,
            num_moe_experts=config.num_moe_experts,
            moe_layers=tuple(isinstance(layer.mlp, MoELayer) for layer in gpt.decoder.layers),
            expert_ffn_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
            moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size,
            moe_shared_expert_gate=config.moe_shared_expert_gate,
            moe_router_load_balancing_type=str(config.moe_router_load_balancing_type),
            moe_aux_loss_coeff=config.moe_aux_loss_coeff,
            moe_z_loss_coeff=config.moe_z_loss_coeff or 0.0,
        ),
        training=BuiltTraining(
            calculate_per_token_loss=config.calculate_per_token_loss,
            use_distributed_optimizer=ddp_config.use_distributed_optimizer,
            accumulate_allreduce_grads_in_fp32=ddp_config.grad_reduce_in_fp32,
            overlap_grad_reduce=ddp_config.overlap_grad_reduce,
            overlap_param_gather=ddp_config.overlap_param_gather,
        ),
    )
