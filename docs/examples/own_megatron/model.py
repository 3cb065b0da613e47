"""The model of ``train.py``: a small GPT of Megatron-core, dense or with experts.

Its layers are TransformerEngine's on GPUs, unless ``--layers local`` is said. Elsewhere they are Megatron's local ones
with what these lack: a norm that marks its parameters for sequence parallelism, and an attention that knows packed rows
and context parallelism.
"""

from __future__ import annotations

import argparse
import copy
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import utils
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build


def build_config(args: argparse.Namespace) -> TransformerConfig:
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    options: dict[str, Any] = {}
    if args.experts:
        options |= {"num_moe_experts": args.experts, "moe_router_topk": 2, "moe_aux_loss_coeff": args.aux_loss_coeff}
        options |= {"moe_ffn_hidden_size": args.hidden_size, "moe_shared_expert_intermediate_size": args.hidden_size}
    if args.recompute == "full":
        options |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if args.fp8_recipe:
        options |= {"fp8": "hybrid", "fp8_recipe": args.fp8_recipe}
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_attention_heads // 2,
        ffn_hidden_size=2 * args.hidden_size,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        init_method_std=args.hidden_size**-0.5,
        transformer_impl=args.layers or ("transformer_engine" if torch.cuda.is_available() else "local"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=args.tp,
        sequence_parallel=args.sp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp,
        overlap_p2p_comm=args.vpp is not None,
        batch_p2p_comm=args.vpp is None,
        variable_seq_lengths=args.packed,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=1,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        recompute_granularity=args.recompute,
        **options,
    )


def build_model(args: argparse.Namespace, config: TransformerConfig) -> list[DistributedDataParallel]:
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.distributed_optimizer
    )
    chunks = []
    for vp_stage in [None] if args.vpp is None else range(args.vpp):
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(config, vp_stage),
            vocab_size=args.vocab_size,
            max_sequence_length=args.seq_length,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=args.tied,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        ).cuda()
        chunk = Float16Module(config, gpt) if args.bf16 else gpt
        chunks.append(DistributedDataParallel(config, ddp_config, chunk))
    return chunks


def layer_spec(config: TransformerConfig, vp_stage: int | None) -> ModuleSpec | TransformerBlockSubmodules:
    if config.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(num_experts=config.num_moe_experts, qk_layernorm=True)
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=True, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = Attention
    attention.q_layernorm = attention.k_layernorm = Norm
    layers = [layer] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


class Norm:
    """Builds torch's RMSNorm; Megatron sums the gradients of marked parameters over tp."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> torch.nn.Module:
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class Attention(DotProductAttention):
    """Megatron's attention over packed rows with a mask, or over the keys of all cp ranks."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # Megatron's class refuses more
        super().__init__(alone, *args, **kwargs)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Attends over ``[s, b, heads, d]``, or packed ``[t, heads, d]``; returns ``[s, b, h]``."""
        if packed_seq_params is not None:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
            attention_mask = hides_other_rows(packed_seq_params.cu_seqlens_q)
        elif mpu.get_context_parallel_world_size() > 1:
            group = mpu.get_context_parallel_group()
            key, value = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (key, value))
            attention_mask = hides_later_tokens(key.shape[0])
        return super().forward(query, key, value, attention_mask, **kwargs)


def get_batch_on_this_cp_rank(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cuts a batch for context parallelism; Megatron-core 0.19 asks for a word, and for the group, else takes all."""
    cut = utils.get_batch_on_this_cp_rank
    words = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(cut).parameters else {}
    return cut(batch, cp_group=mpu.get_context_parallel_group(), **words)


def hides_other_rows(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Bool ``[1, 1, t, t]``: True where the key is of another row than the query, or behind it."""
    rows = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device), cu_seqlens.diff())
    later = torch.ones(len(rows), len(rows), dtype=torch.bool, device=rows.device).triu(1)
    return ((rows[:, None] != rows[None, :]) | later)[None, None]


def hides_later_tokens(length: int) -> torch.Tensor:
    """Bool ``[1, 1, s / cp, s]``: True where the key is behind the query; rank r has pieces r and 2·cp - 1 - r."""
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    pieces = torch.arange(length).chunk(2 * size)
    places = [torch.cat((pieces[each], pieces[2 * size - 1 - each])) for each in range(size)]
    return (torch.cat(places)[None, :] > places[rank][:, None])[None, None].cuda()
