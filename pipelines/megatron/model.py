"""Builds the policy from the configuration: the one place that constructs a Megatron model.

``GPTModel`` is deprecated in megatron-core 0.19 in favour of ``HybridModel``; the change will be here alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mock_scheduler.config.schema import ModelConfig, PipelineConfig
from mock_scheduler.errors import ConfigError
from pipelines.megatron.host_device import has_cuda
from pipelines.megatron.norm import TorchNorm
from pipelines.megatron.runtime import Runtime

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def padded_vocab_size(vocab_size: int, *, multiple_of: int, tp_size: int) -> int:
    """The vocabulary rounded up so that every tp rank holds the same number of rows."""
    multiple = multiple_of * tp_size
    return -(-vocab_size // multiple) * multiple


def build_transformer_config(config: PipelineConfig) -> TransformerConfig:
    """Megatron's configuration of the policy; no fused kernel that changes bits without being asked for."""
    model, parallel = config.model, config.parallel
    dtype = DTYPES[config.precision]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
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
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
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
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )


def _local_layer_spec(model: ModelConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(normalization=model.normalization, qk_layernorm=model.qk_layernorm)
    attention = spec.submodules.self_attention
    if model.qk_layernorm:
        attention_submodules = replace(attention.submodules, q_layernorm=TorchNorm, k_layernorm=TorchNorm)
        attention = replace(attention, submodules=attention_submodules)
    submodules = replace(
        spec.submodules, input_layernorm=TorchNorm, pre_mlp_layernorm=TorchNorm, self_attention=attention
    )
    return replace(spec, submodules=submodules)


def build_layer_spec(model: ModelConfig) -> ModuleSpec | TransformerBlockSubmodules:
    """The layers' modules: Megatron's local ones with our norm, or TransformerEngine's.

    Raises:
        ConfigError: TransformerEngine is asked for where it or a GPU is missing.
    """
    if model.transformer_impl == "transformer_engine":
        if not has_cuda():
            raise ConfigError(
                "model.transformer_impl: transformer_engine computes on a GPU only, and none is visible here; "
                "set model.transformer_impl=local"
            )
        try:
            return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_layernorm)
        except (AssertionError, ImportError, NameError) as error:
            raise ConfigError(
                "model.transformer_impl: transformer_engine is not installed; install the extra "
                "(pip install -e .[te]) or set model.transformer_impl=local"
            ) from error
    return _local_layer_spec(model)


def _final_norm_spec(layer_spec: ModuleSpec, num_layers: int) -> TransformerBlockSubmodules:
    return TransformerBlockSubmodules(layer_specs=[layer_spec] * num_layers, layer_norm=TorchNorm)


def build_policy(
    config: PipelineConfig, transformer_config: TransformerConfig, *, vocab_size: int, runtime: Runtime
) -> torch.nn.Module:
    """This rank's part of the ``GPTModel``, on the compute device, with weights not yet set.

    ``vocab_size`` is the unpadded one. Every rank must call it; it does not communicate.
    """
    model = config.model
    spec = build_layer_spec(model)
    if model.transformer_impl == "local":
        spec = _final_norm_spec(spec, model.num_layers // runtime.pp_size)
    policy = GPTModel(
        config=transformer_config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(
            vocab_size, multiple_of=model.make_vocab_size_divisible_by, tp_size=runtime.tp_size
        ),
        max_sequence_length=config.sequence_length,
        pre_process=runtime.is_first_stage,
        post_process=runtime.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_base=model.rotary_base,
    )
    policy = policy.to(runtime.device)
    return Float16Module(transformer_config, policy) if transformer_config.bf16 else policy


def wrap_data_parallel(
    policy: torch.nn.Module, transformer_config: TransformerConfig, *, use_distributed_optimizer: bool
) -> DistributedDataParallel:
    """The policy with Megatron's gradient buffers: main gradients accumulate and reduce in float32."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    return DistributedDataParallel(transformer_config, ddp_config, policy, disable_bucketing=True)


def unwrapped(model: torch.nn.Module) -> GPTModel:
    """The ``GPTModel`` inside its wrappers."""
    while not isinstance(model, GPTModel):
        model = model.module
    return model
