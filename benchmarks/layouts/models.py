"""The models that are compared: small, with every kind of layer and parameter that a layout splits in its own way."""

from __future__ import annotations

from typing import Any

_DENSE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 96,
    "qk_layernorm": True,
    "rotary_base": 100,
    "init_method_std": 0.08,
    "vocab_size": 62,
}
_MOE: dict[str, Any] = {
    **_DENSE,
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {**_DENSE, "untie_embeddings_and_output_weights": False},
    "moe": _MOE,
    # Balances each row's own tokens, so that other micro-batches are the same function.
    "moe-by-row": {**_MOE, "moe_router_load_balancing_type": "seq_aux_loss"},
}
