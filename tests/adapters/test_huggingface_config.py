"""Configurations of Hugging Face models: what their fields mean, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from mock_scheduler.adapters.huggingface.config import describe_model
from mock_scheduler.errors import ConfigError
from tests.hf_checkpoints import (
    CONFIGS,
    EXPERT_INNER,
    EXPERTS,
    GROUPS,
    HEAD,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    SHARED_INNER,
    VOCAB,
    config_of,
)

DENSE = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "kv_channels": HEAD,
    "ffn_hidden_size": INNER,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": VOCAB,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rope_scaling": None,
    "num_moe_experts": None,
}
MOE = {
    **DENSE,
    "num_moe_experts": EXPERTS,
    "moe_ffn_hidden_size": EXPERT_INNER,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_pre_softmax": False,
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "qwen2": {**DENSE, "add_qkv_bias": True},
    "qwen3": {**DENSE, "qk_layernorm": True, "untie_embeddings_and_output_weights": False},
    "mixtral": {**MOE, "moe_ffn_hidden_size": INNER},
    "qwen2_moe": {
        **MOE,
        "add_qkv_bias": True,
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": SHARED_INNER,
        "moe_shared_expert_gate": True,
    },
    "qwen3_moe": {**MOE, "qk_layernorm": True},
}


def fields_of(kind: str, **changes: object) -> dict[str, Any]:
    return dict(describe_model(config_of(kind, **changes), origin="config.json").fields)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_family_becomes_the_fields_of_megatron(kind: str) -> None:
    assert fields_of(kind) == FIELDS[kind]


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {"head_dim": ...}, {"kv_channels": HIDDEN // HEADS}),
        ("mixtral", {"head_dim": None}, {"kv_channels": HIDDEN // HEADS}),
        ("llama", {"rope_parameters": ..., "rope_theta": 500000.0}, {"rotary_base": 500000}),
        ("llama", {"rope_parameters": ..., "rope_theta": 1234.5, "rope_scaling": None}, {"rotary_base": 1234.5}),
        (
            "llama",
            {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
            {"rotary_base": 500000, "rope_scaling": LLAMA3},
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "rope_theta": 500000},
            {"rope_scaling": LLAMA3},
        ),
        ("qwen3_moe", {"norm_topk_prob": False}, {"moe_router_pre_softmax": True}),
        ("qwen3_moe", {"mlp_only_layers": [1]}, {"moe_layer_freq": [1, 0]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}, {"moe_layer_freq": [0, 1]}),
        ("qwen3_moe", {"num_experts": ..., "num_local_experts": 8}, {"num_moe_experts": 8}),
        ("qwen2", {"tie_word_embeddings": True}, {"untie_embeddings_and_output_weights": False}),
        ("qwen2_moe", {"qkv_bias": False}, {"add_qkv_bias": False}),
        ("qwen2", {"quantization_config": None, "layer_types": ["full_attention"] * LAYERS}, {}),
    ],
)
def test_a_field_of_the_file_is_a_field_of_megatron(
    kind: str, changes: dict[str, object], expected: dict[str, object]
) -> None:
    found = fields_of(kind, **changes)
    assert {name: found[name] for name in expected} == expected


# Fields as the published files of these models have them, besides those of every file.
_OF_EVERY_FILE = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2.5-0.5B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_mrope": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        {"kv_channels": 64, "add_qkv_bias": True, "untie_embeddings_and_output_weights": False, "rotary_base": 1000000},
    ),
    "Llama-3.2-3B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 3072,
            "head_dim": 128,
            "attention_bias": False,
            "mlp_bias": False,
            "intermediate_size": 8192,
            "pretraining_tp": 1,
            "max_position_embeddings": 131072,
            "num_attention_heads": 24,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {**LLAMA3, "rope_type": "llama3"},
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
        {"kv_channels": 128, "rope_scaling": LLAMA3, "layernorm_epsilon": 1e-05, "rotary_base": 500000},
    ),
    "Mixtral-8x7B-v0.1": (
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "output_router_logits": False,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
        {"num_moe_experts": 8, "moe_ffn_hidden_size": 14336, "moe_router_pre_softmax": False, "kv_channels": 128},
    ),
    "Qwen3-Coder-30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "intermediate_size": 5472,
            "max_position_embeddings": 262144,
            "max_window_layers": 28,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "output_router_logits": False,
            "qkv_bias": False,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000000,
            "router_aux_loss_coef": 0.0,
            "shared_expert_intermediate_size": 0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_qk_norm": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        {"num_moe_experts": 128, "moe_router_topk": 8, "kv_channels": 128, "moe_shared_expert_gate": False},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_of_published_models_are_read(name: str) -> None:
    content, expected = PUBLISHED[name]
    found = describe_model({**_OF_EVERY_FILE, **content}, origin=name).fields
    assert {key: found[key] for key in expected} == expected


REFUSED = [
    ("llama", {"model_type": "gemma2"}, "model_type is 'gemma2'; this release reads llama, mixtral, qwen2"),
    ("llama", {"model_type": ...}, "model_type is None"),
    ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, "reads Qwen3ForCausalLM"),
    ("llama", {"attention_bias": True}, "attention_bias is true; this release computes only attention_bias false"),
    ("qwen3", {"attention_bias": True}, "attention_bias is true"),
    ("llama", {"mlp_bias": True}, "mlp_bias is true"),
    ("llama", {"hidden_act": "gelu"}, 'hidden_act is "gelu"; this release computes only hidden_act "silu"'),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window is true"),
    ("mixtral", {"sliding_window": 4096}, "sliding_window is 4096; this release attends to whole rows"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {"),
    ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map is"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 'rope_type is "default" and "yarn"'),
    ("qwen2", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, 'rope_type is "yarn"'),
    (
        "llama",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}},
        "low_freq_factor is missing",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_theta": 1e4, "factor": 8.0}},
        "factor is 8.0, which has no place in rope_type",
    ),
    ("llama", {"rope_theta": 5e5}, "rope_theta is 10000.0 and 500000.0"),
    ("llama", {"rope_parameters": ...}, "rope_theta is missing"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention is"),
    ("llama", {"rope_parameters": [1]}, "must be objects"),
    ("llama", {"rms_norm_eps": ...}, "rms_norm_eps is missing"),
    ("llama", {"hidden_size": "32"}, 'hidden_size is "32", expected a positive integer'),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers is true"),
    ("llama", {"num_key_value_heads": ...}, "num_key_value_heads is missing"),
    ("qwen3", {"head_dim": ...}, "head_dim is missing"),
    ("llama", {"head_dim": ..., "num_attention_heads": 3}, "hidden_size 32 is no multiple of num_attention_heads 3"),
    ("llama", {"tie_word_embeddings": "yes"}, 'tie_word_embeddings is "yes", expected true or false'),
    ("llama", {"logit_scale": 0.5}, "logit_scale is 0.5: an unknown field of llama may change the mathematics"),
    ("llama", {"num_experts": 4}, "num_experts is 4: an unknown field of llama"),
    ("qwen3_moe", {"norm_topk_prob": ...}, "norm_topk_prob is missing"),
    ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers is"),
    ("qwen3_moe", {"num_local_experts": 8}, "num_experts 4 and num_local_experts 8 contradict each other"),
    ("qwen3", {"use_qk_norm": False}, "use_qk_norm is false; this release computes only use_qk_norm true"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size is 64"),
    ("qwen3", {"qkv_bias": True}, "qkv_bias is true"),
    ("mixtral", {"router_jitter_noise": 0.01}, "router_jitter_noise is 0.01"),
]


@pytest.mark.parametrize(("kind", "changes", "text"), REFUSED)
def test_whatever_would_compute_something_else_is_refused_by_name(
    kind: str, changes: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        fields_of(kind, **changes)
    assert text in str(raised.value)


def test_all_problems_of_a_file_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        fields_of("llama", mlp_bias=True, rms_norm_eps=..., logit_scale=2.0)
    assert [line.split()[1] for line in str(raised.value).splitlines()[1:]] == [
        "rms_norm_eps",
        "mlp_bias",
        "logit_scale",
    ]
