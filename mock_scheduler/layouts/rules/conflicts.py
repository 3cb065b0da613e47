"""Rules refuse a configuration that cannot train repeatably, or not at all, before a model is built.

Sources name files of Megatron-core 0.19 unless they say otherwise; PR and issue numbers are Megatron-LM's.
"""

from __future__ import annotations

from functools import partial

from mock_scheduler.layouts.rules.rule import Effect, MegatronRule, Setup

_BLACKWELL, _BLACKWELL_WORKSTATION = 10, (12, 0)
_unrepeatable = partial(MegatronRule, effect=Effect.NOT_REPEATABLE)
_refused = partial(MegatronRule, effect=Effect.REFUSED)
_DETERMINISM = "megatron/training/determinism.py"
_ARGUMENTS = "megatron/training/arguments.py"
_CONVOLUTIONS = frozenset({"gated_delta_net", "gdn", "gdn2"})
# Megatron's own list has Tree too, which the settings table refuses.
_SINGLE_ALGO = frozenset({"Ring", "CollnetDirect", "CollnetChain", "^NVLS"})


def _fuses_aux_loss(setup: Setup) -> bool:
    """``moe_router_aux_loss_fusion`` follows ``moe_router_fusion`` where it is unset or does not exist."""
    # Versions without this field fuse the loss with the router.
    own = setup.values.get("moe_router_aux_loss_fusion")
    return setup.is_on("moe_router_fusion") if own is None else bool(own)


def _is_flash(setup: Setup) -> bool:
    return setup.values.get("attention_backend") == "flash" or setup.is_on("use_flash_attn")


def _is_half_deterministic(setup: Setup) -> bool:
    # Before one of them is known there is nothing to disagree.
    switch = setup.values.get("torch.deterministic_algorithms")
    mode = setup.values.get("deterministic_mode")
    return switch is not None and mode is not None and bool(switch) != bool(mode)


def _needs_one_connection(setup: Setup) -> bool:
    is_split = setup.size("tensor_model_parallel_size") > 1 or setup.size("context_parallel_size") > 1
    is_exempt = setup.is_on("use_megatron_fsdp", "use_torch_fsdp2", "overlap_moe_expert_parallel_comm")
    # Blackwell keeps the order with several queues; FSDP and the overlap of experts need them.
    is_older = setup.device is not None and setup.device[0] < _BLACKWELL
    return is_split and is_older and not is_exempt and setup.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"


def _uses_fused_attention_on_blackwell(setup: Setup) -> bool:
    return (
        setup.device is not None
        and setup.device[0] == _BLACKWELL
        and setup.values.get("attention_backend") == "fused"
        and setup.has_older("cudnn", "9.18.1")
    )


KERNEL_RULES: tuple[MegatronRule, ...] = (
    _unrepeatable(
        name="cross-entropy-fusion",
        shows=("cross_entropy_loss_fusion",),
        applies=lambda setup: setup.is_on("cross_entropy_loss_fusion"),
        breaks="the fused cross-entropy is not repeatable",
        change="Set cross_entropy_loss_fusion=False.",
        source=_DETERMINISM,
    ),
    _unrepeatable(
        name="tp-comm-overlap",
        shows=("tp_comm_overlap",),
        applies=lambda setup: setup.is_on("tp_comm_overlap"),
        breaks="products and communication that overlap through user buffers add in the order of arrival",
        change="Set tp_comm_overlap=False.",
        source=_DETERMINISM,
    ),
    _unrepeatable(
        name="atomic-overlap",
        shows=("tp_comm_atomic_ag", "tp_comm_atomic_rs", "NVTE_RS_STRIDED_ATOMIC", "NVTE_AG_P2P_MULTI_ATOMIC"),
        applies=lambda setup: (
            setup.is_on("tp_comm_atomic_ag", "tp_comm_atomic_rs")
            or setup.is_env_on("NVTE_RS_STRIDED_ATOMIC")
            or setup.is_env_on("NVTE_AG_P2P_MULTI_ATOMIC")
        ),
        breaks="atomic additions have no fixed order",
        change="Set tp_comm_atomic_ag=False and tp_comm_atomic_rs=False, and take both variables away.",
        source="TransformerEngine 2.x, userbuffers",
    ),
    _unrepeatable(
        name="router-aux-loss-fusion",
        shows=("moe_router_aux_loss_fusion", "moe_router_fusion"),
        applies=_fuses_aux_loss,
        breaks=(
            "the fused auxiliary loss of the router differed in 7 of 7 repeats, and follows moe_router_fusion where "
            "moe_router_aux_loss_fusion is unset or does not exist"
        ),
        change="Set moe_router_aux_loss_fusion=False where the version has it, else moe_router_fusion=False.",
        source="PR 6967, applied to older versions too",
    ),
    _unrepeatable(
        name="single-grouped-weight",
        shows=("moe_single_grouped_weight", "NVTE_GROUPED_LINEAR_SINGLE_PARAM"),
        applies=lambda setup: (
            setup.is_on("moe_single_grouped_weight")
            or (setup.is_on("moe_grouped_gemm") and setup.is_env_on("NVTE_GROUPED_LINEAR_SINGLE_PARAM"))
        ),
        breaks="experts' weights in a single parameter are not repeatable in certain cases",
        change="Set moe_single_grouped_weight=False and NVTE_GROUPED_LINEAR_SINGLE_PARAM='0'.",
        source="TransformerEngine 2.x, transformer_engine/pytorch/utils.py",
    ),
    _unrepeatable(
        name="fused-grouped-mlp",
        shows=("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "cudnn-frontend"),
        applies=lambda setup: (
            setup.is_env_on("NVTE_CUTEDSL_FUSED_GROUPED_MLP") and setup.has_older("cudnn-frontend", "1.28")
        ),
        breaks="the gradient of the probabilities is repeatable from cuDNN frontend 1.28 on",
        change="Install nvidia-cudnn-frontend>=1.28, or set NVTE_CUTEDSL_FUSED_GROUPED_MLP='0'.",
        source="TransformerEngine PR 3407",
    ),
    _unrepeatable(
        name="token-dispatcher",
        shows=("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_enable_deepep"),
        applies=lambda setup: (
            setup.values.get("moe_token_dispatcher_type") == "flex" or setup.is_on("moe_enable_deepep")
        ),
        breaks="DeepEP and HybridEP combine tokens in the order of arrival",
        change="Set moe_token_dispatcher_type='alltoall' and moe_enable_deepep=False.",
        source="DeepEP; torchtitan's determinism notes",
    ),
    _unrepeatable(
        name="stochastic-rounding",
        shows=("fp4", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"),
        applies=lambda setup: setup.is_on("fp4") and not setup.is_env_on("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"),
        breaks="NVFP4 rounds by a random number per element, which another layout draws differently",
        change="Set NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING='1'.",
        source="TransformerEngine 2.x, recipe NVFP4BlockScaling",
    ),
)

ATTENTION_RULES: tuple[MegatronRule, ...] = (
    _unrepeatable(
        name="flash-attn-version",
        shows=("attention_backend", "flash-attn"),
        applies=lambda setup: _is_flash(setup) and setup.has_older("flash-attn", "2.4.1"),
        breaks="flash-attn before 2.4.1 has no deterministic backward pass",
        change="Install flash-attn>=2.4.1.",
        source="TransformerEngine 2.x, attention/dot_product_attention/utils.py",
    ),
    _unrepeatable(
        name="flash-attn-3-head-size",
        shows=("flash_attention_version", "kv_channels"),
        applies=lambda setup: setup.values.get("flash_attention_version") == 3 and setup.size("kv_channels") >= 256,
        breaks="the backward pass of flash-attn 3 is not deterministic for heads of 256 and more",
        change="Set flash_attention_version=2.",
        source="TransformerEngine 2.x, attention/dot_product_attention/utils.py",
    ),
    _unrepeatable(
        name="legacy-flash-attn",
        shows=("use_flash_attn", "megatron-core"),
        applies=lambda setup: setup.is_on("use_flash_attn"),
        breaks="this version of Megatron refuses flash attention in deterministic mode",
        change="Set use_flash_attn=False.",
        source=f"{_ARGUMENTS}, Megatron-core 0.15 to 0.18",
        since="0.15",
        before="0.19",
    ),
    _unrepeatable(
        name="fused-attention-on-blackwell",
        shows=("attention_backend", "cudnn"),
        applies=_uses_fused_attention_on_blackwell,
        breaks="the deterministic backward pass of fused attention needs cuDNN 9.18.1 on Blackwell",
        change="Install cuDNN 9.18.1 or later, or set attention_backend='flash'.",
        source="TransformerEngine PR 2584, fused_attn.cpp",
    ),
    _unrepeatable(
        name="fused-attention-on-sm120",
        shows=("attention_backend",),
        applies=lambda setup: (
            setup.device == _BLACKWELL_WORKSTATION and setup.values.get("attention_backend") == "fused"
        ),
        breaks="fused attention has no deterministic backward pass on sm120",
        change="Set attention_backend='flash' or 'unfused'.",
        source="TransformerEngine PR 2798",
    ),
    _unrepeatable(
        name="causal-conv1d-version",
        shows=("is_hybrid_model", "experimental_attention_variant", "causal-conv1d"),
        applies=lambda setup: (
            (setup.is_on("is_hybrid_model") or setup.values.get("experimental_attention_variant") in _CONVOLUTIONS)
            and setup.has_older("causal-conv1d", "1.6.0")
        ),
        breaks="causal-conv1d before 1.6.0 sums its gradients by atomics",
        change="Install causal-conv1d>=1.6.0.",
        source="megatron/core/ssm/causal_conv1d.py",
    ),
)

SWITCH_RULES: tuple[MegatronRule, ...] = (
    _unrepeatable(
        name="half-deterministic",
        shows=("deterministic_mode", "torch.deterministic_algorithms"),
        applies=_is_half_deterministic,
        breaks=(
            "some branches of Megatron follow the one and some the other, and TransformerEngine reads them while the "
            "model is built"
        ),
        change="Set both, before the model is built: deterministic_mode and torch.use_deterministic_algorithms.",
        source="megatron/core/model_parallel_config.py and transformer/moe/moe_utils.py",
    ),
    _unrepeatable(
        name="nccl-algo-of-one-token",
        shows=("NCCL_ALGO", "megatron-core"),
        applies=lambda setup: setup.environ.get("NCCL_ALGO") not in _SINGLE_ALGO,
        breaks="Megatron before 0.19 refuses lists: it wants one of Ring, CollnetDirect, CollnetChain, ^NVLS",
        change="Set NCCL_ALGO='Ring'.",
        source=f"{_ARGUMENTS}, Megatron-core 0.15 to 0.18",
        since="0.15",
        before="0.19",
    ),
    _unrepeatable(
        name="device-max-connections",
        shows=("tensor_model_parallel_size", "context_parallel_size", "CUDA_DEVICE_MAX_CONNECTIONS"),
        applies=_needs_one_connection,
        breaks="with tp > 1 or cp > 1 before Blackwell, only one queue keeps communication and products in order",
        change="Set CUDA_DEVICE_MAX_CONNECTIONS='1' in system_envs.",
        source=_ARGUMENTS,
    ),
    _refused(
        name="fsdp-connections",
        shows=("use_megatron_fsdp", "use_torch_fsdp2", "CUDA_DEVICE_MAX_CONNECTIONS"),
        applies=lambda setup: (
            setup.is_on("use_megatron_fsdp", "use_torch_fsdp2")
            and setup.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        ),
        breaks="FSDP cannot overlap with one queue",
        change="Take CUDA_DEVICE_MAX_CONNECTIONS away.",
        source=_ARGUMENTS,
    ),
    _refused(
        name="ucc-connections",
        shows=("pipeline_model_parallel_comm_backend", "CUDA_DEVICE_MAX_CONNECTIONS"),
        applies=lambda setup: (
            setup.values.get("pipeline_model_parallel_comm_backend") == "ucc"
            and setup.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        ),
        breaks="UCC needs more than one queue",
        change="Raise CUDA_DEVICE_MAX_CONNECTIONS above 1, or set pipeline_model_parallel_comm_backend='nccl'.",
        source="megatron/core/parallel_state.py",
    ),
    _refused(
        name="attention-determinism",
        shows=("deterministic_mode", "transformer_impl", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"),
        applies=lambda setup: (
            setup.is_on("deterministic_mode")
            and setup.values.get("transformer_impl") == "transformer_engine"
            and setup.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") != "0"
        ),
        breaks="TransformerEngine's attention raises in deterministic mode unless this is 0",
        change="Set NVTE_ALLOW_NONDETERMINISTIC_ALGO='0' in system_envs.",
        source="megatron/core/extensions/transformer_engine.py",
    ),
)

CONFLICT_RULES: tuple[MegatronRule, ...] = (*KERNEL_RULES, *ATTENTION_RULES, *SWITCH_RULES)
