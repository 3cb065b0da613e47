"""Says what keeps one process from following a layout in a training of one's own: modules, settings, the layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.layouts.layout import Workload, emulation_limits, layout_problems, ranks_of_replica
from mock_scheduler.megatron.emulation.described import BuiltRun
from mock_scheduler.megatron.emulation.engine import MEGATRON_MODULES
from mock_scheduler.megatron.emulation.modules import find_emulator
from mock_scheduler.megatron.observed_model import ObservedModel

#: Types that only hold others, or that a followed module around them computes.
_WITHIN_OTHERS = (
    GPTModel,
    TransformerBlock,
    TransformerLayer,
    torch.nn.ModuleList,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    torch.nn.Embedding,
    SequentialMLP,
    RotaryEmbedding,
    FusedScaleMaskSoftmax,
    torch.nn.Dropout,
    IdentityOp,
    IdentityFuncOp,
)

#: The values of ``TransformerConfig`` whose arithmetic is followed. Others compute in another order, or are untested.
_MODEL_VALUES: Mapping[str, tuple[object, ...]] = {
    "hidden_dropout": (0.0,),
    "attention_dropout": (0.0,),
    "fp8": (None,),
    "fp4": (None,),
    "bias_activation_fusion": (False,),
    "bias_dropout_fusion": (False,),
    "masked_softmax_fusion": (False,),
    "apply_rope_fusion": (False,),
    "fused_single_qkv_rope": (False,),
    "gradient_accumulation_fusion": (False,),
    "cross_entropy_loss_fusion": (False,),
    "use_te_activation_func": (False,),
    "use_kitchen": (False,),
    "fp32_residual_connection": (False,),
    "activation_func_clamp_value": (None,),
    "attention_output_gate": (False,),
    "softmax_type": ("vanilla",),
    "window_size": (None,),
    "no_rope_freq": (None,),
    "qk_clip": (False,),
    "multi_latent_attention": (False,),
    "experimental_attention_variant": (None,),
    "mtp_num_layers": (None, 0),
    "cpu_offloading": (False,),
    "fine_grained_activation_offloading": (False,),
    "cuda_graph_impl": ("none",),
    "delay_wgrad_compute": (False,),
    "defer_embedding_wgrad_compute": (False,),
    "num_layers_in_first_pipeline_stage": (None,),
    "num_layers_in_last_pipeline_stage": (None,),
    "account_for_embedding_in_pipeline_split": (False,),
    "account_for_loss_in_pipeline_split": (False,),
    "pipeline_model_parallel_layout": (None,),
}

#: The same for a model with experts.
_EXPERT_VALUES: Mapping[str, tuple[object, ...]] = {
    "moe_token_dispatcher_type": ("alltoall", "allgather"),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "none"),
    "moe_grouped_gemm": (False,),
    "moe_router_fusion": (False,),
    "moe_permute_fusion": (False,),
    "moe_apply_probs_on_input": (False,),
    "moe_expert_capacity_factor": (None,),
    "moe_input_jitter_eps": (None,),
    "moe_router_force_load_balancing": (False,),
    "moe_enable_routing_replay": (False,),
    "moe_router_padding_for_quantization": (False, None),
    "moe_shared_expert_overlap": (False,),
    "moe_shared_expert_gate": (False,),
    "moe_latent_size": (None,),
    "overlap_moe_expert_parallel_comm": (False,),
}

#: The same of ``DistributedDataParallelConfig``: all of these cut or add gradients in another way.
_BUFFER_VALUES: Mapping[str, tuple[object, ...]] = {
    "use_megatron_fsdp": (False,),
    "average_in_collective": (False,),
    "num_distributed_optimizer_instances": (1,),
    "pad_buckets_for_high_nccl_busbw": (False,),
    "delay_wgrad_compute": (False,),
}


def following_limits(model: ObservedModel, run: BuiltRun, layout: ParallelConfig) -> list[str]:
    """Lists everything that keeps this process from following a layout with this model; empty where it can."""
    return [
        *model_limits(model, run),
        *layout_problems(layout, _workload(run, layout)),
        *_vocabulary_problems(next(model.gpts()), layout),
        *layout_limits(run, layout),
    ]


def model_limits(model: ObservedModel, run: BuiltRun) -> list[str]:
    """Lists what keeps this process from following any layout with this model."""
    gpt = next(model.gpts())
    experts = _EXPERT_VALUES if run.model.num_moe_experts is not None else {}
    return [
        *_unfollowed_modules(gpt),
        *_unfollowed_values(gpt.config, {**_MODEL_VALUES, **experts}),
        *_unfollowed_values(_buffers(model), _BUFFER_VALUES),
        *_optimizer_problems(model.optimizers),
    ]


def _buffers(model: ObservedModel) -> DistributedDataParallelConfig:
    chunk = model.chunks[0]
    assert isinstance(chunk, DistributedDataParallel)  # ``follow`` asks first
    return chunk.ddp_config


def _unfollowed_modules(gpt: GPTModel) -> Iterator[str]:
    """Yields each type of module that is not followed, and where it is first met."""
    met: dict[type, str] = {}
    for path, module in gpt.named_modules():
        if type(module) not in _WITHIN_OTHERS and find_emulator(module, MEGATRON_MODULES) is None:
            met.setdefault(type(module), path or "the model itself")
    for kind, path in met.items():
        yield f"module {path} is a {kind.__module__}.{kind.__qualname__}, whose products and sums are not known"


def _unfollowed_values(config: object, followed: Mapping[str, tuple[object, ...]]) -> Iterator[str]:
    assert dataclasses.is_dataclass(config)
    known = {item.name for item in dataclasses.fields(config)}
    for name, values in followed.items():
        # A field that this version of Megatron does not have is one that it does not compute by.
        if name in known and (found := getattr(config, name)) not in values:
            yield f"{type(config).__name__}.{name} {found}: only {' or '.join(map(str, values))} is followed"


def _optimizer_problems(optimizers: list[MegatronOptimizer]) -> Iterator[str]:
    for optimizer in optimizers:
        if type(optimizer) not in (Float16OptimizerWithFloat16Params, FP32Optimizer, DistributedOptimizer):
            yield f"the optimizer is a {type(optimizer).__name__}, whose gradient norm is not known"
        elif type(optimizer) is not FP32Optimizer and optimizer.grad_scaler is not None:
            yield "the optimizer scales the loss (fp16); only float32 and bfloat16 are followed"


def _workload(run: BuiltRun, layout: ParallelConfig) -> Workload:
    # Micro-batches and lengths are known when they come: ``Following`` checks each update and each pass.
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    return Workload(
        model=run.model,
        num_micro_batches=layout.data_parallel_size * pp,
        sequence_multiple_of=2 * tp * layout.context_parallel_size,
    )


def _vocabulary_problems(gpt: GPTModel, layout: ParallelConfig) -> Iterator[str]:
    size, tp = gpt.embedding.word_embeddings.num_embeddings, layout.tensor_model_parallel_size
    if size % tp:
        yield (
            f"the vocabulary of {size} rows is not a multiple of tensor_model_parallel_size {tp}; pad it to the same "
            "number in both runs"
        )


def layout_limits(run: BuiltRun, layout: ParallelConfig) -> Iterator[str]:
    """Yields what keeps one process from following this layout, whatever the model's modules are."""
    yield from emulation_limits(layout, run.model, run.training, routers=("megatron",))
    dp, ep = layout.data_parallel_size, layout.expert_model_parallel_size
    if layout.context_parallel_size > 1 and run.model.num_moe_experts is not None:
        yield (
            f"context_parallel_size {layout.context_parallel_size} with experts: one process routes the tokens of a "
            "line in their order, and ranks route slices of it"
        )
    if run.model.num_moe_experts is not None and ep > ranks_of_replica(layout):
        yield (
            f"expert_model_parallel_size {ep} above tensor_model_parallel_size × context_parallel_size: experts would "
            "see micro-batches of several replicas at once, and the training computes them one by one"
        )
    # Dividing by a power of two is exact; rounded thirds add up to another number than a third of the sum.
    if dp & (dp - 1) and not run.training.calculate_per_token_loss:
        yield (
            f"data_parallel_size {dp} with calculate_per_token_loss false: each replica divides by its own number of "
            "micro-batches, which is followed for powers of 2 alone"
        )
