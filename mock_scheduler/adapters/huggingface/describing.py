"""Describes a model that was trained from scratch as one of Hugging Face's kinds; imports no torch.

Contract: the written ``config.json`` means the model's own fields again, as ``config.describe_model`` reads it, or the
model is refused with every field that no kind has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mock_scheduler.adapters.huggingface.architectures import ARCHITECTURES, MIXTRAL_EXPERTS
from mock_scheduler.adapters.huggingface.config import describe_model
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.text import bullet_list


def write_config(fields: Mapping[str, Any], *, dtype: str, max_positions: int) -> dict[str, Any]:
    """Makes a ``config.json`` for fields of Megatron's configuration; raises ``ConfigError``.

    Args:
        fields: all that ``describe_model`` gives, by the same names; ``head_size`` and such are spelled out in them.
        dtype: of the weights, as ``float32``.
        max_positions: the longest sequence that the model was trained on.
    """
    kind = _find_kind(fields)
    content = {
        "architectures": [ARCHITECTURES[kind].causal],
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": fields["kv_channels"],
        "hidden_act": "silu",
        "hidden_size": fields["hidden_size"],
        "intermediate_size": fields["ffn_hidden_size"],
        "max_position_embeddings": max_positions,
        "model_type": kind,
        "num_attention_heads": fields["num_attention_heads"],
        "num_hidden_layers": fields["num_layers"],
        "num_key_value_heads": fields["num_query_groups"],
        "rms_norm_eps": fields["layernorm_epsilon"],
        "rope_parameters": _rope(fields),
        "tie_word_embeddings": not fields["untie_embeddings_and_output_weights"],
        "use_cache": True,
        "vocab_size": fields["vocab_size"],
        **_experts(kind, fields),
    }
    read = describe_model(content, origin="the model as a Hugging Face one").fields
    problems = [f"model.{name} is {fields[name]!r}, and {kind} has {value!r}" for name, value in read.items()
                if name in fields and fields[name] != value]  # fmt: skip
    if problems:
        raise ConfigError(f"no kind of Hugging Face model is this one; the nearest differs:{bullet_list(problems)}")
    return content


def _find_kind(fields: Mapping[str, Any]) -> str:
    """Finds the kind by its layers; whatever else it does not have is told later."""
    has_experts = fields["num_moe_experts"] is not None
    if fields["add_qkv_bias"]:
        return "qwen2_moe" if has_experts else "qwen2"
    if fields["qk_layernorm"]:
        return "qwen3_moe" if has_experts else "qwen3"
    return "mixtral" if has_experts else "llama"


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    scaling = fields["rope_scaling"]
    kind = {"rope_type": "default"} if scaling is None else {"rope_type": "llama3", **scaling}
    return {"rope_theta": float(fields["rotary_base"]), **kind}


def _experts(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    names = ARCHITECTURES[kind].experts
    if names is None:
        return {}
    content = {
        names.count[0]: fields["num_moe_experts"],
        "num_experts_per_tok": fields["moe_router_topk"],
        names.width: fields["moe_ffn_hidden_size"],
    }
    if names is MIXTRAL_EXPERTS:
        return content
    sparse = fields["moe_layer_freq"]
    dense: Sequence[int] = [] if sparse == 1 else [layer for layer, has_experts in enumerate(sparse) if not has_experts]
    content |= {
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "norm_topk_prob": not fields["moe_router_pre_softmax"],
    }
    shared = fields["moe_shared_expert_intermediate_size"]
    return content | ({"shared_expert_intermediate_size": shared} if ARCHITECTURES[kind].has_shared_expert else {})


def write_header(shapes: Mapping[str, Sequence[int]], *, dtype: str, item_bytes: int) -> str:
    """Writes the header of a file with tensors of one dtype, in safetensors' order: by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in sorted(shapes):
        stop = start + item_bytes
        for size in shapes[name]:
            stop = start + (stop - start) * size
        header[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":"))
    return text.ljust(-(-len(text) // 8) * 8)
