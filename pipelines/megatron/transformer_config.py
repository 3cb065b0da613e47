"""Builds Megatron's configuration of a model, and reads it back for the library's rules.

The one place that knows how ``TransformerConfig`` spells its values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from mock_scheduler.determinism.probes import gpu_capability, installed_versions
from mock_scheduler.layouts.rules.rule import Setup
from mock_scheduler.megatron.full_precision import finalize_wide
from mock_scheduler.support.tensor_bytes import dtype_name
from pipelines.config.model import ModelConfig
from pipelines.config.schema import PipelineConfig
from pipelines.config.training import LOSS_VALUES, TrainingConfig
from pipelines.megatron.layers.experts import moe_config_fields

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def build_transformer_config(config: PipelineConfig) -> TransformerConfig:
    """Builds Megatron's configuration of the model; no fused kernel changes bits without being asked for."""
    model, parallel, training = config.model, config.parallel, config.training
    dtype = DTYPES[config.precision]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.kv_channels,
        ffn_hidden_size=model.ffn_size,
        normalization=model.normalization,
        layernorm_epsilon=model.layernorm_epsilon,
        gated_linear_unit=model.swiglu,
        activation_func=F.silu if model.swiglu else F.gelu,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        init_method_std=model.init_method_std,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        transformer_impl=model.transformer_impl,
        attention_backend=AttnBackend[model.attention_backend],
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        # One way or the other: Megatron refuses both, and its default of neither overlap nor batch does not exist.
        overlap_p2p_comm=parallel.num_chunks > 1 and parallel.overlap_p2p_comm,
        batch_p2p_comm=not (parallel.num_chunks > 1 and parallel.overlap_p2p_comm),
        variable_seq_lengths=training.batching == "dynamic" and parallel.pipeline_model_parallel_size > 1,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Megatron marks which parameters are split only while it initialises them; the values are replaced after.
        perform_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        calculate_per_token_loss=training.calculate_per_token_loss,
        finalize_model_grads_func=finalize_wide if dtype is torch.float64 else finalize_model_grads,
        **_recomputation(training),
        # Lengths that vary need a dispatcher that takes them, which Megatron asks of models without experts too.
        **{"moe_token_dispatcher_type": "alltoall", **moe_config_fields(model, parallel, dtype)},
    )


def _recomputation(training: TrainingConfig) -> dict[str, object]:
    """Megatron's fields for activations that are computed anew in the backward pass."""
    if training.recompute_granularity == "none":
        return {}
    if training.recompute_granularity == "selective":
        return {"recompute_granularity": "selective"}
    return {
        "recompute_granularity": "full",
        "recompute_method": training.recompute_method,
        "recompute_num_layers": training.recompute_num_layers,
    }


def megatron_values(
    transformer_config: TransformerConfig, ddp_config: DistributedDataParallelConfig | None = None
) -> dict[str, object]:
    """Reads every field of both configurations by name, and torch's own switch as ``torch.deterministic_algorithms``.

    Enums by their member's name, dtypes by name; functions and modules are left out. A field of both is the optimizer's
    concern and is taken from ``ddp_config``.
    """
    configs = [config for config in (transformer_config, ddp_config) if config is not None]
    values = {
        field.name: _plain(getattr(config, field.name)) for config in configs for field in dataclasses.fields(config)
    }
    plain = {name: value for name, value in values.items() if not callable(value)}
    return {**plain, "torch.deterministic_algorithms": torch.are_deterministic_algorithms_enabled()}


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.name
    return dtype_name(value) if isinstance(value, torch.dtype) else value


def read_setup(
    transformer_config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig | None = None,
    *,
    model: ModelConfig,
    environ: Mapping[str, str],
) -> Setup:
    """Reads all facts for ``find_conflicts`` and ``check_conflicts``. Every rank may call it.

    ``model``: says whose router is used. ``environ``: ``os.environ``.
    """
    own = {"moe_router_impl": model.moe_router_impl, "loss_values": LOSS_VALUES}
    return Setup(
        values={**megatron_values(transformer_config, ddp_config), **own},
        environ=environ,
        versions=installed_versions(),
        device=gpu_capability(environ),
    )
