"""Builds models from the configuration: the one place that constructs a Megatron model.

``GPTModel`` is deprecated in megatron-core 0.19 in favour of ``HybridModel``; the change will be here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mock_scheduler.errors import ConfigError
from pipelines.config.model import ModelConfig
from pipelines.config.schema import PipelineConfig
from pipelines.config.training import TrainingConfig
from pipelines.megatron.layers.attention import RowAttention, RowRotaryEmbedding
from pipelines.megatron.layers.experts import expert_mlp_spec, moe_config_fields
from pipelines.megatron.layers.norm import TorchNorm
from pipelines.megatron.layers.repairs import repair_layers
from pipelines.megatron.layers.value_head import ValueHead
from pipelines.megatron.perturbation import perturb_embedding
from pipelines.megatron.process.full_precision import finalize_wide, widen_rotary
from pipelines.megatron.process.host_device import has_cuda
from pipelines.megatron.process.runtime import Runtime

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

Head = Literal["logits", "value"]
"""What the last layer gives: logits over the vocabulary, or one value per token."""


def padded_vocab_size(vocab_size: int, *, multiple_of: int, tp_size: int) -> int:
    """The vocabulary rounded up so that every tp rank holds the same number of rows."""
    multiple = multiple_of * tp_size
    return -(-vocab_size // multiple) * multiple


def vocab_parts(config: PipelineConfig, runtime: Runtime) -> int:
    """Into how many tp ranks' parts the vocabulary is cut, those of a layout that is emulated included."""
    emulated = config.order.emulate
    return runtime.tp_size if emulated is None else emulated.tensor_model_parallel_size


def build_transformer_config(config: PipelineConfig) -> TransformerConfig:
    """Megatron's configuration of the model; no fused kernel that changes bits without being asked for."""
    model, parallel, training = config.model, config.parallel, config.training
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


def _local_layer_spec(model: ModelConfig, *, has_experts: bool) -> ModuleSpec:
    """One of Megatron's local layers with our norm and our way to its attention."""
    spec = get_gpt_layer_local_spec(normalization=model.normalization, qk_layernorm=model.qk_layernorm)
    attention = spec.submodules.self_attention
    attention_submodules = replace(attention.submodules, core_attention=RowAttention)
    if model.qk_layernorm:
        attention_submodules = replace(attention_submodules, q_layernorm=TorchNorm, k_layernorm=TorchNorm)
    submodules = replace(
        spec.submodules,
        input_layernorm=TorchNorm,
        pre_mlp_layernorm=TorchNorm,
        self_attention=replace(attention, submodules=attention_submodules),
    )
    if has_experts:
        submodules = replace(submodules, mlp=expert_mlp_spec(model))
    return replace(spec, submodules=submodules)


def _te_layer_spec(model: ModelConfig, *, has_experts: bool) -> ModuleSpec:
    """One of TransformerEngine's layers.

    Raises:
        ConfigError: TransformerEngine or a GPU is missing.
    """
    if not has_cuda():
        raise ConfigError(
            "model.transformer_impl: transformer_engine computes on a GPU only, and none is visible here; "
            "set model.transformer_impl=local"
        )
    num_experts = model.num_moe_experts if has_experts else None
    try:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts, moe_grouped_gemm=False, qk_layernorm=model.qk_layernorm
        )
    except (AssertionError, ImportError, NameError) as error:
        raise ConfigError(
            "model.transformer_impl: transformer_engine is not installed; install the extra "
            "(pip install -e .[te]) or set model.transformer_impl=local"
        ) from error
    if has_experts:
        spec = replace(spec, submodules=replace(spec.submodules, mlp=expert_mlp_spec(model)))
    return spec


def build_layer_specs(model: ModelConfig, layers: Sequence[int]) -> TransformerBlockSubmodules:
    """The modules of these layers, by global number from 0, and of the norm behind the last.

    Raises:
        ConfigError: TransformerEngine is asked for where it or a GPU is missing.
    """
    is_local = model.transformer_impl == "local"
    layer_spec = _local_layer_spec if is_local else _te_layer_spec
    specs = [layer_spec(model, has_experts=model.moe_layers[layer]) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TorchNorm if is_local else _te_norm())


def _te_norm() -> type:
    # Imported here, since it imports TransformerEngine, which is an extra.
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def layers_of_chunk(num_layers: int, runtime: Runtime, chunk: int) -> range:
    """The global numbers, from 0, of the layers that a chunk of this stage holds (Megatron's interleaved order)."""
    per_chunk = num_layers // (runtime.pp_size * runtime.num_chunks)
    start = (chunk * runtime.pp_size + runtime.pp_rank) * per_chunk
    return range(start, start + per_chunk)


def build_chunks(
    config: PipelineConfig,
    transformer_config: TransformerConfig,
    *,
    vocab_size: int,
    runtime: Runtime,
    head: Head = "logits",
) -> list[torch.nn.Module]:
    """This rank's chunks of the ``GPTModel``, on the compute device, with weights not yet set.

    ``vocab_size`` is the unpadded one. Every rank must call it; it does not communicate.
    """
    return [
        _build_chunk(config, transformer_config, chunk, vocab_size=vocab_size, runtime=runtime, head=head)
        for chunk in range(runtime.num_chunks)
    ]


def _build_chunk(
    config: PipelineConfig,
    transformer_config: TransformerConfig,
    chunk: int,
    *,
    vocab_size: int,
    runtime: Runtime,
    head: Head,
) -> torch.nn.Module:
    model = config.model
    is_last = runtime.is_last_stage and chunk == runtime.num_chunks - 1
    gpt = GPTModel(
        config=transformer_config,
        transformer_layer_spec=build_layer_specs(model, layers_of_chunk(model.num_layers, runtime, chunk)),
        vocab_size=padded_vocab_size(
            vocab_size, multiple_of=model.make_vocab_size_divisible_by, tp_size=vocab_parts(config, runtime)
        ),
        max_sequence_length=config.sequence_length,
        pre_process=runtime.is_first_stage and chunk == 0,
        post_process=is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=head == "logits" and not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_base=model.rotary_base,
        vp_stage=chunk if runtime.num_chunks > 1 else None,
    )
    gpt.built_from = model
    gpt.emulated = None
    if head == "value" and is_last:
        gpt.output_layer = ValueHead(transformer_config)
    if model.position_embedding_type == "rope" and model.transformer_impl == "local":
        gpt.rotary_pos_emb = RowRotaryEmbedding(gpt.rotary_pos_emb, num_positions=num_positions(config))
        if transformer_config.params_dtype is torch.float64:
            widen_rotary(gpt.rotary_pos_emb.inner, rotary_base=model.rotary_base)
    repair_layers(gpt)
    if model.position_embedding_type == "learned_absolute" and gpt.pre_process:
        # Megatron makes them in float32, whatever the model's dtype.
        gpt.embedding.position_embeddings.to(dtype=transformer_config.params_dtype)
    perturb_embedding(gpt, config.perturbation)
    gpt = gpt.to(runtime.device)
    return Float16Module(transformer_config, gpt) if transformer_config.bf16 else gpt


def num_positions(config: PipelineConfig) -> int:
    """Positions that a token of a run can have, padding included."""
    return max(config.sequence_length, config.training.max_tokens_per_micro_batch or 0)


def wrap_data_parallel(
    chunks: Sequence[torch.nn.Module], transformer_config: TransformerConfig, training: TrainingConfig
) -> list[DistributedDataParallel]:
    """The chunks with Megatron's gradient buffers; main gradients of narrow parameters accumulate in float32.

    Raises:
        ConfigError: communication is to overlap with computation where there is no GPU.
    """
    overlaps = training.overlap_grad_reduce or training.overlap_param_gather
    if overlaps and not has_cuda():
        raise ConfigError(
            "training.overlap_grad_reduce and overlap_param_gather need CUDA streams, and no GPU is visible here; set "
            "both to false"
        )
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=training.accumulate_allreduce_grads_in_fp32
        and transformer_config.params_dtype is not torch.float64,
        overlap_grad_reduce=training.overlap_grad_reduce,
        overlap_param_gather=training.overlap_param_gather,
        use_distributed_optimizer=training.use_distributed_optimizer,
    )
    # Megatron buckets the first chunk only (megatron/training/training.py); without overlap a bucket has no use.
    wrapped = [
        DistributedDataParallel(transformer_config, ddp_config, chunk, disable_bucketing=not overlaps or index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if overlaps:
        _let_communication_overlap(wrapped, transformer_config, training)
    return wrapped


def _let_communication_overlap(
    wrapped: Sequence[DistributedDataParallel], transformer_config: TransformerConfig, training: TrainingConfig
) -> None:
    """Give the schedules what they call between micro-batches, as ``megatron/training/training.py`` does."""
    functions: dict[str, list[object]] = {"no_sync_func": [chunk.no_sync for chunk in wrapped]}
    if training.overlap_param_gather:
        functions["param_sync_func"] = [chunk.start_param_sync for chunk in wrapped]
    if len(wrapped) > 1:
        functions["grad_sync_func"] = [chunk.start_grad_sync for chunk in wrapped]
    for name, per_chunk in functions.items():
        setattr(transformer_config, name, per_chunk if len(wrapped) > 1 else per_chunk[0])


def unwrapped(model: torch.nn.Module) -> GPTModel:
    """The ``GPTModel`` inside its wrappers."""
    inner: Any = model
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner
