"""Writes small Hugging Face checkpoints with names and shapes of its own, for tests without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, GROUPS, HEAD, INNER, LAYERS, VOCAB = 32, 4, 2, 12, 40, 2, 96
EXPERTS, EXPERT_INNER, SHARED_INNER = 4, 24, 16

_COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "head_dim": HEAD,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": 256,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": GROUPS,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "transformers_version": "5.12.1",
    "use_cache": True,
    "vocab_size": VOCAB,
}
_EXPERTS = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_INNER,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 4096},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "tie_word_embeddings": True},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **_EXPERTS,
        "architectures": ["Qwen2MoeForCausalLM"],
        "shared_expert_intermediate_size": SHARED_INNER,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], **_EXPERTS},
}


def config_of(kind: str, **changes: object) -> dict[str, Any]:
    """The ``config.json`` of a kind; a change to ``...`` leaves a field out."""
    content = {"model_type": kind, **_COMMON, **CONFIGS[kind], **changes}
    return {name: value for name, value in content.items() if value is not ...}


def shapes_of(kind: str) -> dict[str, list[int]]:
    """Every tensor of a kind with its shape."""
    shapes = {"model.embed_tokens.weight": [VOCAB, HIDDEN], "model.norm.weight": [HIDDEN]}
    if not config_of(kind)["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [VOCAB, HIDDEN]
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(kind).items()}
    return shapes


def _layer_shapes(kind: str) -> dict[str, list[int]]:
    shapes = {
        "input_layernorm.weight": [HIDDEN],
        "post_attention_layernorm.weight": [HIDDEN],
        "self_attn.q_proj.weight": [HEADS * HEAD, HIDDEN],
        "self_attn.k_proj.weight": [GROUPS * HEAD, HIDDEN],
        "self_attn.v_proj.weight": [GROUPS * HEAD, HIDDEN],
        "self_attn.o_proj.weight": [HIDDEN, HEADS * HEAD],
    }
    if kind.startswith("qwen2"):
        shapes |= {f"self_attn.{name}_proj.bias": shapes[f"self_attn.{name}_proj.weight"][:1] for name in "qkv"}
    if kind.startswith("qwen3"):
        shapes |= {"self_attn.q_norm.weight": [HEAD], "self_attn.k_norm.weight": [HEAD]}
    match kind:
        case "llama" | "qwen2" | "qwen3":
            return shapes | _mlp_shapes("mlp.", INNER)
        case "mixtral":
            shapes["block_sparse_moe.gate.weight"] = [EXPERTS, HIDDEN]
            for expert in range(EXPERTS):
                shapes |= _mlp_shapes(f"block_sparse_moe.experts.{expert}.", INNER, names=("w1", "w3", "w2"))
            return shapes
        case _:
            shapes["mlp.gate.weight"] = [EXPERTS, HIDDEN]
            for expert in range(EXPERTS):
                shapes |= _mlp_shapes(f"mlp.experts.{expert}.", EXPERT_INNER)
    if kind == "qwen2_moe":
        shapes |= {"mlp.shared_expert_gate.weight": [1, HIDDEN], **_mlp_shapes("mlp.shared_expert.", SHARED_INNER)}
    return shapes


def _mlp_shapes(
    prefix: str, inner: int, *, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, list[int]]:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {gate: [inner, HIDDEN], up: [inner, HIDDEN], down: [HIDDEN, inner]}


def make_tensors(kind: str, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random values for every tensor; norms are around 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (0.1 * torch.randn(shape, generator=generator) + name.endswith("norm.weight")).to(dtype)
        for name, shape in shapes_of(kind).items()
    }


def write_checkpoint(
    folder: Path,
    kind: str,
    *,
    dtype: torch.dtype = torch.float32,
    num_files: int = 1,
    tensors: Mapping[str, torch.Tensor] | None = None,
    config: Mapping[str, object] | None = None,
) -> dict[str, torch.Tensor]:
    """Writes a folder as ``save_pretrained`` does, in so many weight files; returns the tensors."""
    tensors = make_tensors(kind, dtype) if tensors is None else dict(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_json(folder / "config.json", config_of(kind) if config is None else config)
    save_json(folder / "tokenizer.json", {"version": "1.0", "model": {"type": "BPE"}})
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return tensors
    names = list(tensors)
    places: dict[str, str] = {}
    for index in range(num_files):
        file, own = f"model-{index + 1:05d}-of-{num_files:05d}.safetensors", names[index::num_files]
        save_file({name: tensors[name] for name in own}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(own, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    save_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    return tensors


def save_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes as transformers does."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
