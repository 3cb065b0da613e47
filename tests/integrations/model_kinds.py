"""Models of TransformerEngine's and Megatron-Bridge's classes, as a rank of a layout has them; nothing computes.

In a process group that moves nothing, one process is each rank in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3Config, Qwen3MoeConfig

from tests.integrations.host_kernels import building_layers

HIDDEN, VOCABULARY, LENGTH = 64, 128, 8
_GATED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
}
_DENSE = {**_GATED, "num_query_groups": 2, "qk_layernorm": True, "ffn_hidden_size": 128}
_EXPERTS: dict[str, Any] = {
    **_GATED,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 96,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
_GROUPED = {**_EXPERTS, "moe_grouped_gemm": True}
_LATENT = {
    **_GATED,
    "qk_layernorm": True, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8, "rope_type": "rope",
}  # fmt: skip
_LATENT_PROJECTIONS = [f"linear_{name}_{way}_proj" for name in ("q", "kv") for way in ("down", "up")]
_EVERYWHERE = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model: Megatron's options, and what of Megatron-Bridge is put on it or builds it."""

    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: Callable[[], Any] | None = None
    hf_config: Any = None


KINDS: dict[str, Kind] = {
    "gpt2_like": Kind(options={"ffn_hidden_size": 256}),
    "qwen3_like": Kind(options=_DENSE),
    "moe_sequential": Kind(options=_EXPERTS),
    "moe_grouped": Kind(options=_GROUPED),
    "shared_experts": Kind(
        options={**_GROUPED, "moe_shared_expert_intermediate_size": 32, "moe_layer_freq": [0, 1, 1, 1]}
    ),
    "latent": Kind(options=_LATENT),
    "predicting": Kind(options={**_GROUPED, "mtp_num_layers": 2}),
    "lora": Kind(options=_DENSE, adapter=partial(LoRA, dim=8)),
    "canonical_lora": Kind(options=_DENSE, adapter=partial(CanonicalLoRA, dim=8)),
    "dora": Kind(options=_DENSE, adapter=partial(DoRA, dim=8)),
    "lora_latent": Kind(
        options=_LATENT,
        adapter=partial(
            LoRA,
            dim=8,
            target_modules=[*_LATENT_PROJECTIONS, "linear_proj"],
        ),
    ),
    "lora_sequential": Kind(
        options={**_EXPERTS, "moe_router_dtype": "fp64"},  # float32 would be multiplied by a kernel
        adapter=partial(LoRA, dim=8, target_modules=[*_EVERYWHERE, "router"]),
    ),
    "lora_grouped": Kind(options=_GROUPED, adapter=partial(LoRA, dim=8)),
    "lora_each_expert": Kind(options=_GROUPED, adapter=partial(LoRA, dim=8, share_expert_adapters=False)),
    "lora_outer": Kind(options=_GROUPED, adapter=partial(LoRA, dim=8, experts_shared_outer_loras=True)),
    "canonical_each_expert": Kind(options=_GROUPED, adapter=partial(CanonicalLoRA, dim=8, share_expert_adapters=False)),
    # Trained in FP8, by each recipe; parameters stay as they are.
    **{
        f"fp8_{recipe}": Kind(options={**_DENSE, "fp8": "hybrid", "fp8_recipe": recipe})
        for recipe in ("delayed", "tensorwise", "blockwise")
    },
    "bridge_dense": Kind(hf_config=Qwen3Config),
    "bridge_experts": Kind(hf_config=Qwen3MoeConfig),
}

_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def degrees_of(layout: str) -> dict[str, int]:
    """By axis, as ``tp2-sp-ep2`` names them."""
    words = [word for word in layout.split("-") if word not in ("sp", "distributed")]
    return {word.rstrip("0123456789"): int(word[-1]) for word in words}


def num_ranks(layout: str) -> int:
    """Of a layout: as few as it needs."""
    degrees = degrees_of(layout)
    dense = degrees.get("tp", 1) * degrees.get("dp", 1)
    return max(dense, degrees.get("ep", 1) * degrees.get("etp", 1)) * degrees.get("pp", 1)


@contextmanager
def on_rank(layout: str, rank: int) -> Iterator[dict[str, Any]]:
    """This process is that rank in the block; gives Megatron's options of the layout."""
    degrees = degrees_of(layout)
    options: dict[str, Any] = {_AXES[axis]: size for axis, size in degrees.items() if axis != "dp"}
    options.setdefault("expert_tensor_parallel_size", 1)
    dist.init_process_group("fake", rank=rank, world_size=num_ranks(layout), store=FakeStore())
    mpu.initialize_model_parallel(**options, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    try:
        yield {**options, "sequence_parallel": "sp" in layout}
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def build_config(kind: Kind, layout: Mapping[str, Any]) -> TransformerConfig:
    """Four layers in float32."""
    options: dict[str, Any] = {
        "num_layers": 4, "hidden_size": HIDDEN, "num_attention_heads": 4, "ffn_hidden_size": 96,
        "params_dtype": torch.float32, "pipeline_dtype": torch.float32,
        "overlap_p2p_comm": "virtual_pipeline_model_parallel_size" in layout,
        "batch_p2p_comm": "virtual_pipeline_model_parallel_size" not in layout,
        **layout, **kind.options,
    }  # fmt: skip
    return (MLATransformerConfig if "kv_lora_rank" in options else TransformerConfig)(**options)


def build_chunks(kind: Kind, layout: Mapping[str, Any], *, is_distributed: bool) -> list[DistributedDataParallel]:
    """This rank's chunks with TransformerEngine's layers, wrapped as for a training."""
    stages = range(layout.get("virtual_pipeline_model_parallel_size") or 1)
    stages_or_none = [None] if len(stages) == 1 else list(stages)
    with building_layers():
        if kind.hf_config is None:
            config = build_config(kind, layout)
            chunks = [_gpt(config, stage) for stage in stages_or_none]
        else:
            provider = _provider(kind.hf_config, layout)
            chunks = [provider.provide(**_ends(stage), vp_stage=stage) for stage in stages_or_none]
            config = provider
        if kind.adapter is not None:
            chunks = kind.adapter()(chunks)
        buffers = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed)
        return [DistributedDataParallel(config, buffers, chunk) for chunk in chunks]


def _ends(stage: int | None) -> dict[str, bool]:
    return {
        "pre_process": mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        "post_process": mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
    }


def _gpt(config: TransformerConfig, stage: int | None) -> GPTModel:
    specs = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)
    prediction = None
    if config.mtp_num_layers:
        prediction = get_gpt_mtp_block_spec(config, specs, use_transformer_engine=True, vp_stage=stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=specs,
        mtp_block_spec=prediction,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        vp_stage=stage,
        **_ends(stage),
    )


def _provider(hf_config: Any, layout: Mapping[str, Any]) -> Any:
    """Megatron-Bridge's description of a model of Hugging Face's."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "decoder_sparse_step": 1}
    config = hf_config(
        num_hidden_layers=4, hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, tie_word_embeddings=False,
        architectures=[hf_config.__name__.replace("Config", "ForCausalLM")],
        **(experts if hf_config is Qwen3MoeConfig else {}),
    )  # fmt: skip
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    for key, value in layout.items():
        setattr(provider, key, value)
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.bf16 = provider.gradient_accumulation_fusion = False
    provider.finalize()
    return provider
