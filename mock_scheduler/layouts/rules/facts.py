"""Rules name repeatable options with an effect on the computation: facts to record, no reasons to refuse a run.

``DEPENDS_ON_LAYOUT``: the same run in another layout draws other numbers or drops other tokens, so only equal layouts
compare. ``CHANGES_BITS``: both runs must have it alike to be bit-equal; otherwise they compare within rounding.
"""

from __future__ import annotations

from collections.abc import Callable

from mock_scheduler.layouts.rules.rule import Effect, MegatronRule, Setup

_CONFIG = "megatron/core/transformer/transformer_config.py"


def _layout(field: str, breaks: str, change: str, *, applies: Callable[[Setup], bool] | None = None) -> MegatronRule:
    return MegatronRule(
        name=field.replace("_", "-"),
        effect=Effect.DEPENDS_ON_LAYOUT,
        shows=(field,),
        applies=applies or (lambda setup: setup.is_on(field)),
        breaks=breaks,
        change=change,
        source=_CONFIG,
    )


_MASKS = "dropout's masks follow the rank and the layout"
_DROPS = "which tokens an expert drops follows from the tokens of the local batch"

_DEPENDS_ON_LAYOUT: tuple[MegatronRule, ...] = (
    _layout("hidden_dropout", _MASKS, "Set hidden_dropout=0 to compare layouts."),
    _layout("attention_dropout", _MASKS, "Set attention_dropout=0 to compare layouts."),
    _layout(
        "moe_input_jitter_eps", "the jitter is drawn per rank", "Set moe_input_jitter_eps=None to compare layouts."
    ),
    _layout(
        "moe_expert_capacity_factor",
        _DROPS,
        "Set moe_expert_capacity_factor=None to compare layouts.",
        applies=lambda setup: setup.values.get("moe_expert_capacity_factor") is not None,
    ),
    _layout(
        "moe_pad_expert_input_to_capacity", _DROPS, "Set moe_pad_expert_input_to_capacity=False to compare layouts."
    ),
)

# Why -> fields; each is a fact of its own where it is on.
_ON_CHANGES_BITS: dict[str, tuple[str, ...]] = {
    "a fused kernel rounds elsewhere than the operations that it replaces": (
        *("bias_dropout_fusion", "bias_activation_fusion", "bias_swiglu_fusion", "masked_softmax_fusion"),
        *("apply_rope_fusion", "fused_single_qkv_rope", "persist_layer_norm", "fused_residual_rmsnorm"),
        *("memory_efficient_layer_norm", "use_fused_weighted_squared_relu", "use_te_activation_func"),
    ),
    "gradients of weights are added straight into the main gradient, without rounding in between": (
        "gradient_accumulation_fusion",
    ),
    "tokens are ordered or summed otherwise inside an expert": (
        *("moe_permute_fusion", "moe_grouped_gemm", "moe_router_fusion", "moe_shared_expert_overlap"),
        "moe_apply_probs_on_input",
    ),
    "gradients of norms and routers are summed over parts of the sequence": ("sequence_parallel",),
    "values are scaled and rounded to a few bits, by a state that must be restored": (
        *("fp8", "fp4", "fp8_param", "fp8_dot_product_attention", "fp8_multi_head_attention", "tp_only_amax_red"),
        "first_last_layers_bf16",
    ),
    "gradients are reduced bucket by bucket, in the order of the buckets": (
        *("overlap_grad_reduce", "overlap_param_gather", "bucket_size", "align_param_gather"),
    ),
    "gradients are reduced or scaled otherwise": (
        *("use_distributed_optimizer", "grad_reduce_in_fp32", "average_in_collective", "calculate_per_token_loss"),
    ),
    "gradients of weights are computed later": ("defer_embedding_wgrad_compute", "delay_wgrad_compute"),
    "initial weights are drawn otherwise, unless canonical ones are loaded": ("use_cpu_initialization",),
    "precision of products or of the softmax changes": (
        *("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "disable_bf16_reduced_precision_matmul"),
    ),
}


def _fact(field: str, breaks: str, applies: Callable[[Setup], bool]) -> MegatronRule:
    return MegatronRule(
        name=field.replace("_", "-") + "-bits",
        effect=Effect.CHANGES_BITS,
        shows=(field,),
        applies=applies,
        breaks=breaks,
        change="Keep it equal in both runs, or compare within rounding.",
        source=_CONFIG,
    )


def _on_fact(field: str, breaks: str) -> MegatronRule:
    return _fact(field, breaks, lambda setup: setup.is_on(field))


def _experts_fact(field: str, breaks: str) -> MegatronRule:
    """Makes the fact of a field with a meaning only for experts."""
    # The field has a default without experts too, which says nothing then.
    return _fact(field, breaks, lambda setup: setup.is_on("num_moe_experts") and setup.values.get(field) is not None)


_CHANGES_BITS: tuple[MegatronRule, ...] = (
    _fact(
        "attention_backend",
        "the backend of attention sums in its own order, and auto chooses by version and device",
        lambda setup: setup.values.get("attention_backend") is not None,
    ),
    _fact(
        "cuda_graph_impl",
        "a graph replays the kernels of its capture and draws random numbers at other offsets",
        lambda setup: setup.values.get("cuda_graph_impl", "none") != "none",
    ),
    _fact(
        "num_distributed_optimizer_instances",
        "gradients are reduced in two steps",
        lambda setup: setup.size("num_distributed_optimizer_instances") > 1,
    ),
    _experts_fact("moe_token_dispatcher_type", "dispatchers order the tokens of an expert differently"),
    _experts_fact("moe_router_dtype", "one unit in the last place of a logit can choose another expert"),
    *(_on_fact(field, breaks) for breaks, fields in _ON_CHANGES_BITS.items() for field in fields),
)

FACT_RULES: tuple[MegatronRule, ...] = (*_DEPENDS_ON_LAYOUT, *_CHANGES_BITS)
