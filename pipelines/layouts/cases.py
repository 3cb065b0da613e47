"""Which layouts, models and precisions are compared, and the configuration of each."""

from __future__ import annotations

import re
from typing import Any, Literal

from mock_scheduler.config.schema import PipelineConfig
from pipelines.layouts.rows import GROUP_SIZE, NUM_GROUPS

ModelName = Literal["dense", "moe"]
Precision = Literal["float32", "float64"]

SEED = 42
LONGEST_ROW = 56
NUM_STEPS = 2
ONE_PROCESS = "tp1"

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
MODELS: dict[str, dict[str, Any]] = {
    "dense": {**_DENSE, "untie_embeddings_and_output_weights": False},
    "moe": {
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
    },
}

LAYOUTS: dict[str, tuple[str, ...]] = {
    "dense": (
        *("tp2", "tp2-sp", "pp2", "pp2-vpp2", "cp2", "dp2", "dp2-plain"),
        *("tp4-sp", "pp4", "cp4", "dp4", "tp2-pp2", "tp2-sp-pp2-vpp2", "tp2-sp-cp2", "tp2-dp2", "pp2-cp2", "pp2-dp2"),
        *("cp2-dp2", "pp2-vpp2-dp2-plain"),
        *("tp2-sp-pp2-dp2", "tp2-sp-pp2-cp2", "tp2-sp-cp2-dp2", "pp2-vpp2-cp2-dp2", "tp4-sp-pp2"),
    ),
    "moe": (
        *("pp2", "pp2-vpp2", "cp2", "dp2", "dp2-ep2", "dp2-ep2-plain", "cp2-ep2", "tp2-sp-ep2"),
        *("dp4-ep4", "dp4-ep2", "pp2-dp2-ep2", "tp2-sp-dp2-ep2", "tp2-sp-dp2-ep4", "tp2-sp-cp2-ep2"),
        *("pp2-vpp2-dp2-ep2", "cp2-dp2-ep4", "tp2-sp-pp2-ep2"),
        *("tp2-sp-pp2-dp2-ep2", "tp2-sp-pp2-vpp2-dp2-ep4", "tp2-sp-pp2-cp2-ep2", "pp2-cp2-dp2-ep4"),
    ),
}

_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}


def parallel_of(layout: str) -> dict[str, Any]:
    """``tp2-sp-pp2`` as the ``parallel`` section; ``plain`` is the optimizer that is not distributed."""
    parts = layout.split("-")
    sizes = {}
    for part in parts:
        match = re.fullmatch(r"([a-z]+)(\d+)", part)
        if match is not None:
            sizes[_AXES[match[1]]] = int(match[2])
    return {**sizes, "sequence_parallel": "sp" in parts}


def build_config(model: str, layout: str, precision: str, **changes: Any) -> PipelineConfig:  # noqa: ANN401 - keys
    """A run of two updates per step on 16 rows; ``changes``: top-level keys over it."""
    num_rows = NUM_GROUPS * GROUP_SIZE
    values: dict[str, Any] = {
        "exp_name": "layouts",
        "seed": SEED,
        "max_steps": NUM_STEPS,
        "rollout_batch_size": num_rows,
        "val_batch_size": num_rows,
        "sequence_length": 64,
        "precision": precision,
        "use_kl_loss": True,
        "entropy_loss_coef": 0.01,
        "model": MODELS[model],
        "parallel": parallel_of(layout),
        "training": {
            "micro_batch_size": 1,
            "global_batch_size": 8,
            "lr": 1e-3,
            "clip_grad": 0.3,
            "use_distributed_optimizer": "plain" not in layout.split("-"),
        },
        "actor_infer": {"only_action_tokens": True},
        "train_env_manager": {"num_env_groups": NUM_GROUPS, "group_size": GROUP_SIZE},
        "val_env_manager": {"num_env_groups": NUM_GROUPS, "group_size": GROUP_SIZE},
    }
    merged = {**values, **changes}
    merged["training"] = {**values["training"], **changes.get("training", {})}
    return PipelineConfig.model_validate(merged)
