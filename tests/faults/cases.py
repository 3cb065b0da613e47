"""The tiny trainings that faults are put into: one step of two updates of a small model, in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.layouts.cases import GROUP_SIZE, NUM_GROUPS, parallel_of
from benchmarks.layouts.options import merge_changes
from mock_scheduler.config.layout import ParallelConfig
from pipelines.config.schema import PipelineConfig
from tests.faults.fault import Precision, Run

SEED = 42
LONGEST_ROW = 28

_DENSE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 96,
    "qk_layernorm": True,
    "rotary_base": 100,
    "init_method_std": 0.08,
    "vocab_size": 62,
    "untie_embeddings_and_output_weights": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": _DENSE,
    "deep": {**_DENSE, "num_layers": 4},
    "tied": {**_DENSE, "untie_embeddings_and_output_weights": False},
    "biases": {**_DENSE, "add_bias_linear": True},
    "learned": {**_DENSE, "position_embedding_type": "learned_absolute"},
    "moe": {
        **_DENSE,
        "num_moe_experts": 4,
        "moe_layer_freq": [0, 1],
        "moe_ffn_hidden_size": 48,
        "moe_shared_expert_intermediate_size": 32,
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.1,
    },
}
"""Small, and each with what a layout splits in its own way."""

OPTIONS: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "one-micro-batch": {"training": {"micro_batch_size": 8}},
    "micro-batch-2": {"training": {"micro_batch_size": 2}},
    "one-update": {"training": {"global_batch_size": 16}},
    "packing": {"training": {"sequence_packing": True, "max_tokens_per_micro_batch": 64}},
    "recompute-full": {"training": {"recompute_granularity": "full"}},
    "micro-batch-means": {"training": {"calculate_per_token_loss": False}},
    "megatron-router": {"model": {"moe_router_impl": "megatron"}},
    "batched-p2p": {"parallel": {"overlap_p2p_comm": False}},
    "expert-biases": {"model": {"add_bias_linear": True, "moe_shared_expert_intermediate_size": None}},
    **{
        f"allow-{rule}": {"parallel": {"allow_known_wrong": [rule]}}
        for rule in (
            *("pipeline-crossing", "experts-under-tp", "aux-loss-per-token"),
            *("loss-tuple-under-cp", "expert-bias-under-tp"),
        )
    },
}
#: What one process must have too, to compute the same.
_CHANGES_VALUES = ("one-update", "micro-batch-means", "megatron-router", "expert-biases")


def reference_of(run: Run) -> Run:
    """One process that computes the same in the plainest way."""
    kept = [name for name in run.option.split("+") if name in _CHANGES_VALUES]
    return Run(model=run.model, option="+".join(kept) or "plain")


def world_size(run: Run) -> int:
    """Processes that it needs."""
    return ParallelConfig.model_validate(parallel_of(run.layout)).world_size


def build_config(run: Run, precision: Precision, *, changes: Mapping[str, Any] | None = None) -> PipelineConfig:
    """A step of two updates on 8 trajectories each; ``changes``: what proofs add, as ``order`` or ``perturbation``."""
    groups = {"num_env_groups": NUM_GROUPS, "group_size": GROUP_SIZE}
    values: dict[str, Any] = {
        "exp_name": "faults",
        "seed": SEED,
        "max_steps": 1,
        "rollout_batch_size": NUM_GROUPS * GROUP_SIZE,
        "val_batch_size": NUM_GROUPS * GROUP_SIZE,
        "sequence_length": 64,
        "precision": precision,
        "use_kl_loss": True,
        "entropy_loss_coef": 0.01,
        "model": MODELS[run.model],
        "parallel": parallel_of(run.layout),
        "training": {
            "micro_batch_size": 4,
            "global_batch_size": 8,
            "lr": 1e-3,
            "weight_decay": 0.1,
            "clip_grad": 0.3,
            "use_distributed_optimizer": "plain" not in run.layout.split("-"),
        },
        "actor_infer": {"only_action_tokens": False},
        "train_env_manager": groups,
        "val_env_manager": groups,
    }
    options = [OPTIONS[name] for name in run.option.split("+")]
    return PipelineConfig.model_validate(merge_changes(values, [*options, changes or {}]))
