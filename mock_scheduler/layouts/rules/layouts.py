"""Refuses layouts and modes that compute wrong values, or that Megatron refuses, in any run.

``megatron.training`` guards against some of them; a model built from ``megatron.core`` alone, as in this project, has
no guard. Layouts with wrong values are in ``mock_scheduler.layouts.rules.known_wrong``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mock_scheduler.layouts.rules.known_wrong import KNOWN_WRONG
from mock_scheduler.layouts.rules.rule import Effect, MegatronRule, Setup

_refused = partial(MegatronRule, effect=Effect.REFUSED)
_ARGUMENTS = "megatron/training/arguments.py"


_PARALLELISM: tuple[MegatronRule, ...] = (
    _refused(
        name="sequence-parallel-without-tp",
        shows=("sequence_parallel", "tensor_model_parallel_size"),
        applies=lambda setup: setup.is_on("sequence_parallel") and setup.size("tensor_model_parallel_size") == 1,
        breaks="sequence parallelism splits over tensor parallel ranks, of which there is one",
        change="Set sequence_parallel=False, or tensor_model_parallel_size above 1.",
        source="megatron/core/model_parallel_config.py",
    ),
    _refused(
        name="overlap-without-sequence-parallel",
        shows=("tp_comm_overlap", "sequence_parallel"),
        applies=lambda setup: setup.is_on("tp_comm_overlap") and not setup.is_on("sequence_parallel"),
        breaks="tp_comm_overlap needs sequence parallelism",
        change="Set tp_comm_overlap=False, or sequence_parallel=True.",
        source=_ARGUMENTS,
    ),
    _refused(
        name="cross-entropy-of-te",
        shows=("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
        applies=lambda setup: (
            setup.is_on("cross_entropy_loss_fusion") and setup.values.get("cross_entropy_fusion_impl") == "te"
        ),
        breaks="TransformerEngine's cross-entropy is refused for issues of stability",
        change="Set cross_entropy_loss_fusion=False, or cross_entropy_fusion_impl='native'.",
        source=_ARGUMENTS,
        since="0.19",
    ),
)


def _hybrid_cp(name: str, shows: str, applies: Callable[[Setup], bool], change: str) -> MegatronRule:
    return _refused(
        name=f"hybrid-cp-{name}",
        shows=("hybrid_context_parallel", shows),
        applies=lambda setup: setup.is_on("hybrid_context_parallel") and applies(setup),
        breaks="hybrid context parallelism does not go with it",
        change=change,
        source=_ARGUMENTS,
    )


_HYBRID_CP: tuple[MegatronRule, ...] = (
    _hybrid_cp(
        "pipeline",
        "pipeline_model_parallel_size",
        lambda setup: setup.size("pipeline_model_parallel_size") > 1,
        "Set pipeline_model_parallel_size=1.",
    ),
    _hybrid_cp(
        "cuda-graph",
        "cuda_graph_impl",
        lambda setup: setup.values.get("cuda_graph_impl", "none") != "none",
        "Set cuda_graph_impl='none'.",
    ),
    _hybrid_cp(
        "fsdp",
        "use_megatron_fsdp",
        lambda setup: setup.is_on("use_megatron_fsdp", "use_torch_fsdp2"),
        "Set use_megatron_fsdp=False.",
    ),
    _hybrid_cp(
        "loss",
        "calculate_per_token_loss",
        lambda setup: setup.values.get("calculate_per_token_loss") is False,
        "Set calculate_per_token_loss=True.",
    ),
)


def _batch_invariant(
    shows: str, applies: Callable[[Setup], bool], change: str, *, since: str | None = "0.19"
) -> MegatronRule:
    return _refused(
        name=f"batch-invariant-{shows.replace('_', '-')}",
        shows=("batch_invariant_mode", shows),
        applies=lambda setup: setup.is_on("batch_invariant_mode") and applies(setup),
        breaks="batch-invariant kernels do not support it",
        change=f"{change} Or set batch_invariant_mode=False.",
        source="megatron/core/transformer/transformer_config.py",
        since=since,
    )


def _other_than(name: str, *allowed: object) -> Callable[[Setup], bool]:
    """Says whether a field exists and is none of the allowed values."""
    # A version without the field cannot have it wrong.
    return lambda setup: setup.values.get(name) is not None and setup.values[name] not in allowed


def _is_on(name: str) -> Callable[[Setup], bool]:
    return lambda setup: setup.is_on(name)


def _dispatches_otherwise(setup: Setup) -> bool:
    return setup.is_on("num_moe_experts") and setup.values.get("moe_token_dispatcher_type") != "alltoall"


_BATCH_INVARIANT: tuple[MegatronRule, ...] = (
    _batch_invariant("params_dtype", _other_than("params_dtype", "bfloat16"), "Train in bfloat16."),
    _batch_invariant(
        "attention_backend", _other_than("attention_backend", "flash"), "Set attention_backend='flash'.", since=None
    ),
    _batch_invariant(
        "flash_attention_version",
        _other_than("flash_attention_version", 3, 4),
        "Set flash_attention_version to 3 or 4.",
    ),
    _batch_invariant(
        "context_parallel_size",
        lambda setup: setup.size("context_parallel_size") > 1,
        "Set context_parallel_size=1.",
    ),
    _batch_invariant("attention_dropout", _is_on("attention_dropout"), "Set attention_dropout=0."),
    _batch_invariant("moe_token_dispatcher_type", _dispatches_otherwise, "Set moe_token_dispatcher_type='alltoall'."),
    _batch_invariant("fp8", _is_on("fp8"), "Set fp8=None."),
    _batch_invariant("fp4", _is_on("fp4"), "Set fp4=None."),
    _batch_invariant("moe_permute_fusion", _is_on("moe_permute_fusion"), "Set moe_permute_fusion=False."),
    _batch_invariant(
        "moe_permute_fusion_into_hybridep",
        _is_on("moe_permute_fusion_into_hybridep"),
        "Set moe_permute_fusion_into_hybridep=False.",
    ),
    _batch_invariant(
        "moe_expert_capacity_factor",
        lambda setup: setup.values.get("moe_expert_capacity_factor") is not None,
        "Set moe_expert_capacity_factor=None.",
    ),
    _batch_invariant(
        "moe_pad_expert_input_to_capacity",
        _is_on("moe_pad_expert_input_to_capacity"),
        "Set moe_pad_expert_input_to_capacity=False.",
    ),
)

LAYOUT_RULES: tuple[MegatronRule, ...] = (*KNOWN_WRONG, *_PARALLELISM, *_HYBRID_CP, *_BATCH_INVARIANT)
