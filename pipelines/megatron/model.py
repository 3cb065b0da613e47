"""Builds models from the configuration: the one place that constructs a Megatron model.

``GPTModel`` is deprecated in megatron-core 0.19 in favour of ``HybridModel``; the change will be here alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mock_scheduler.errors import ConfigError
from mock_scheduler.megatron.full_precision import widen_rotary
from mock_scheduler.megatron.host_device import has_cuda
from mock_scheduler.megatron.perturbation import perturb_embedding
from pipelines.config.model import ModelConfig
from pipelines.config.schema import PipelineConfig
from pipelines.config.training import TrainingConfig
from pipelines.megatron.layers.attention import RowAttention, RowRotaryEmbedding, stretch_waves
from pipelines.megatron.layers.experts import expert_mlp_spec
from pipelines.megatron.layers.repairs import TorchNorm, ValueHead, repair_layers
from pipelines.megatron.process_of_rank import Runtime

Head = Literal["logits", "value"]
"""What the last layer gives: logits over the vocabulary, or one value per token."""


def padded_vocab_size(vocab_size: int, *, multiple_of: int, tp_size: int) -> int:
    """The vocabulary rounded up so that every tp rank holds the same number of rows."""
    multiple = multiple_of * tp_size
    return -(-vocab_size // multiple) * multiple


def find_idle_vocabulary(
    allowed_tokens: Collection[int] | None, vocab_size: int, *, multiple_of: int, tp_size: int
) -> list[int]:
    """Finds the tp ranks of whose part of the vocabulary no token may be chosen: their softmax is of nothing.

    ``allowed_tokens``: ``None`` allows all.
    """
    if allowed_tokens is None:
        return []
    part = padded_vocab_size(vocab_size, multiple_of=multiple_of, tp_size=tp_size) // tp_size
    busy = {token // part for token in allowed_tokens}
    return [rank for rank in range(tp_size) if rank not in busy]


def _local_layer_spec(model: ModelConfig, *, has_experts: bool) -> ModuleSpec:
    """Returns one of Megatron's local layers with our norm and our way to its attention."""
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
    """Returns one of TransformerEngine's layers.

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
    """Returns the modules of these layers, by global number from 0, and of the norm behind the last.

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
    vocab_parts: int,
    runtime: Runtime,
    head: Head = "logits",
) -> list[torch.nn.Module]:
    """Returns this rank's chunks of the ``GPTModel``, on the compute device, with weights not yet set.

    ``vocab_size`` is the unpadded one; padded, it has ``vocab_parts`` equal parts. Every rank must call it; it does
    not communicate.
    """
    return [
        _build_chunk(
            config,
            transformer_config,
            chunk,
            vocab_size=vocab_size,
            vocab_parts=vocab_parts,
            runtime=runtime,
            head=head,
        )
        for chunk in range(runtime.num_chunks)
    ]


def _build_chunk(
    config: PipelineConfig,
    transformer_config: TransformerConfig,
    chunk: int,
    *,
    vocab_size: int,
    vocab_parts: int,
    runtime: Runtime,
    head: Head,
) -> torch.nn.Module:
    model = config.model
    is_last = runtime.is_last_stage and chunk == runtime.num_chunks - 1
    gpt = GPTModel(
        config=transformer_config,
        transformer_layer_spec=build_layer_specs(model, layers_of_chunk(model.num_layers, runtime, chunk)),
        vocab_size=padded_vocab_size(vocab_size, multiple_of=model.make_vocab_size_divisible_by, tp_size=vocab_parts),
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
    if head == "value" and is_last:
        gpt.output_layer = ValueHead(transformer_config)
    if model.position_embedding_type == "rope":
        if model.transformer_impl == "local" and transformer_config.params_dtype is torch.float64:
            widen_rotary(gpt.rotary_pos_emb, rotary_base=model.rotary_base)
        if model.rope_scaling is not None:
            stretch_waves(gpt.rotary_pos_emb, model.rope_scaling)
        if model.transformer_impl == "local":
            gpt.rotary_pos_emb = RowRotaryEmbedding(gpt.rotary_pos_emb, num_positions=num_positions(config))
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
    """Returns the chunks with Megatron's gradient buffers; main gradients of narrow parameters accumulate in float32.

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
    """Gives the schedules the functions to call between micro-batches, as ``megatron/training/training.py`` does."""
    functions: dict[str, list[object]] = {"no_sync_func": [chunk.no_sync for chunk in wrapped]}
    if training.overlap_param_gather:
        functions["param_sync_func"] = [chunk.start_param_sync for chunk in wrapped]
    if len(wrapped) > 1:
        functions["grad_sync_func"] = [chunk.start_grad_sync for chunk in wrapped]
    for name, per_chunk in functions.items():
        setattr(transformer_config, name, per_chunk if len(wrapped) > 1 else per_chunk[0])
