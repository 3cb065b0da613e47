"""Settings of torch's switches, of compilers that choose kernels by timing, and of attention and TransformerEngine.

Source of the ``NVTE_*`` variables: ``getenv`` and ``environ`` in TransformerEngine up to 2.20, of which
``tests/determinism/source_variables.yaml`` has every name. It reads some of them when it is imported, so all must be
exported before.
"""

from __future__ import annotations

from functools import partial

from mock_scheduler.determinism.settings.setting import Between, Family, Kind, ReadAt, Setting

_flag = partial(Setting, kind=Kind.FLAG, read_at=ReadAt.EVERY_CALL, reader="torch")
_compiler = partial(Setting, between_runs=Between.REPORTED, read_at=ReadAt.TORCH_IMPORT)
_BY_TIMING = "kernels that are chosen by timing differ between runs"

_SWITCHES: tuple[Setting, ...] = (
    _flag(
        name="torch.deterministic_algorithms",
        pattern="True",
        recommended="True",
        between_runs=Between.MUST_MATCH,
        read_at=ReadAt.MODEL_BUILD,
        source="ROLL, rollout dump mock guide; torch.use_deterministic_algorithms",
        remedy="Megatron, TransformerEngine and torch choose repeatable implementations by it",
    ),
    _flag(
        name="torch.deterministic_warn_only",
        pattern="False",
        recommended="False",
        between_runs=Between.MUST_MATCH,
        source="torch.use_deterministic_algorithms",
        remedy="with warn_only an operation without a repeatable implementation runs all the same",
    ),
    _flag(
        name="torch.cudnn.deterministic",
        pattern="True",
        recommended="True",
        between_runs=Between.MUST_MATCH,
        source="ROLL, rollout dump mock guide; torch documentation, Reproducibility",
        remedy="otherwise cuDNN may use kernels that add in no fixed order",
    ),
    _flag(
        name="torch.cudnn.benchmark",
        pattern="False",
        recommended="False",
        between_runs=Between.MUST_MATCH,
        source="ROLL, rollout dump mock guide; torch documentation, Reproducibility",
        remedy=_BY_TIMING,
    ),
    _flag(
        name="torch.fill_uninitialized_memory",
        between_runs=Between.REPORTED,
        source="torch.utils.deterministic; torchtitan turns it off, since the fill races DeepEP's streams",
        remedy="it turns reads of uninitialised memory into NaN; keep it equal",
    ),
    _flag(
        name="torch.default_dtype",
        between_runs=Between.REPORTED,
        source="torch.set_default_dtype",
        remedy="tensors that are made without a dtype have it",
    ),
)

_COMPILERS: tuple[Setting, ...] = (
    *(
        _compiler(name=name, pattern="0", recommended="0", reader="torch.compile", source=source, remedy=_BY_TIMING)
        for name, source in (
            ("TORCHINDUCTOR_MAX_AUTOTUNE", "torch._inductor.config.max_autotune"),
            ("TORCHINDUCTOR_COORDINATE_DESCENT_TUNING", "torch._inductor.config.coordinate_descent_tuning"),
        )
    ),
    *(
        _compiler(
            name=name,
            kind=Kind.FLAG,
            pattern="False|not imported",
            recommended="False",
            read_at=ReadAt.EVERY_CALL,
            reader="torch.compile",
            source="torch._inductor.config",
            remedy=_BY_TIMING,
        )
        for name in ("torch.inductor.max_autotune", "torch.inductor.coordinate_descent_tuning")
    ),
    _compiler(
        name="torch.inductor.deterministic",
        kind=Kind.FLAG,
        read_at=ReadAt.EVERY_CALL,
        reader="torch.compile",
        source="torch._inductor.config.deterministic, where the version has it",
        remedy="it switches choices by timing off; keep it equal",
    ),
    _compiler(
        name="TRITON_CACHE_AUTOTUNING",
        pattern="0|1",
        reader="mamba-ssm and Megatron's Triton kernels",
        source="megatron/core/determinism.py, Megatron-core after 0.19",
        remedy="only 0 and 1 are understood; 1 needs a TRITON_CACHE_DIR that all ranks share",
    ),
    _compiler(
        name="TRITON_CACHE_DIR",
        per_node=True,
        between_runs=Between.RECORDED,
        reader="Triton",
        source="Triton, runtime/cache.py",
        remedy="kernels that were compiled and tuned are kept there; ship it to freeze them",
    ),
    _compiler(
        name="TORCHINDUCTOR_CACHE_DIR",
        per_node=True,
        between_runs=Between.RECORDED,
        reader="torch.compile",
        source="torch, torch._inductor",
        remedy="kernels that were compiled and tuned are kept there; ship it to freeze them",
    ),
)

_SSM: tuple[Setting, ...] = tuple(
    Setting(
        name=name,
        pattern=r"(1.*)?",
        recommended="1",
        between_runs=Between.MUST_MATCH,
        read_at=ReadAt.TORCH_IMPORT,
        reader=reader,
        source="megatron/training/determinism.py, Megatron-core 0.19",
        remedy="otherwise gradients are summed by atomics",
    )
    for name, reader in (("MAMBA_DETERMINISTIC", "mamba-ssm"), ("CAUSAL_CONV1D_DETERMINISTIC", "causal-conv1d"))
)

TORCH_SETTINGS: tuple[Setting, ...] = (*_SWITCHES, *_SSM, *_COMPILERS)

# torch, torch/_inductor/config.py: the ones that choose kernels, fusions or rounding.
_INDUCTOR_DOCUMENTED = """
AUTOGRAD_CACHE COMPILE_THREADS CPP_WRAPPER CUDAGRAPHS CUTLASS_ENABLED_OPS DECOMPOSE_MEM_BOUND_MM
EMULATE_DIVISION_ROUNDING EMULATE_PRECISION_CASTS FORCE_DISABLE_CACHES FREEZING FX_GRAPH_CACHE
MAX_AUTOTUNE_CONV_BACKENDS MAX_AUTOTUNE_GEMM MAX_AUTOTUNE_GEMM_BACKENDS MAX_AUTOTUNE_GEMM_SEARCH_SPACE
MAX_AUTOTUNE_POINTWISE MIXED_MM_CHOICE MULTI_KERNEL NAN_ASSERTS PERSISTENT_REDUCTIONS SHAPE_PADDING UNIQUE_KERNEL_NAMES
"""

TORCH_FAMILIES: tuple[Family, ...] = (
    Family(
        prefix="TORCHINDUCTOR_",
        read_at=ReadAt.TORCH_IMPORT,
        reader="torch.compile",
        documented=frozenset(f"TORCHINDUCTOR_{name}" for name in _INDUCTOR_DOCUMENTED.split()),
    ),
    Family(prefix="TRITON_AUTOTUNE_", read_at=ReadAt.TORCH_IMPORT, reader="Triton"),
    Family(
        prefix="TRITON_",
        read_at=ReadAt.TORCH_IMPORT,
        reader="Triton",
        between_runs=Between.RECORDED,
        per_node=True,
        documented=frozenset({"TRITON_ALWAYS_COMPILE", "TRITON_F32_DEFAULT", "TRITON_INTERPRET"}),
    ),
)


_te = partial(Setting, between_runs=Between.REPORTED, read_at=ReadAt.TE_IMPORT, reader="TransformerEngine")

# The change -> the variables that make it.
_CHANGES_BITS: dict[str, tuple[str, ...]] = {
    "it pins the backend of attention, which is chosen by itself where unset; write all of them": (
        *("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"),
        *("NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4", "NVTE_FUSED_ATTN_USE_FAv2_BWD"),
    ),
    "it changes how attention computes in FP8; keep it equal": (
        *("NVTE_FP8_DPA_BWD", "NVTE_DPA_FP8_FORMAT", "NVTE_DPA_FP8_RECIPE"),
        *("NVTE_DPA_FP8_RECIPE_DPA", "NVTE_DPA_FP8_RECIPE_MHA"),
        *("NVTE_DPA_FP8DS_AMAX_ALGO", "NVTE_DPA_FP8DS_AMAX_HISTLEN", "NVTE_DPA_FP8DS_REDUCE_AMAX"),
        *("NVTE_UNFUSED_FP8_UPDATE", "NVTE_DPA_FP8CS_O_in_F16", "NVTE_UnfusedDPA_Emulate_FP8"),
    ),
    "it changes how FP8 and FP4 values are scaled, rounded or summed; keep it equal": (
        *("NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"),
        *("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"),
        *("NVTE_FUSED_GROUP_REQUANTIZE", "NVTE_BACKWARD_OVERRIDE"),
        *("NVTE_NVFP4_DISABLE_RHT", "NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "NVTE_NVFP4_ROW_SCALED_ACTIVATION"),
        *("NVTE_NVFP4_4OVER6", "NVTE_NVFP4_4OVER6_E4M3_USE_256"),
        *("NVTE_NVFP4_4OVER6_ERR_MODE", "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH"),
        "NVTE_CUDNN_MXFP8_NORM_OUTPUT_IN_INPUT_DTYPE",
    ),
    "it changes how norms and functions are computed; keep it equal": (
        *("NVTE_USE_FAST_MATH", "NVTE_NORM_FWD_USE_CUDNN", "NVTE_NORM_BWD_USE_CUDNN"),
        *("NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN", "NVTE_INF_LAYERNORM_SM_MARGIN"),
        *("NVTE_EXT_MARGIN_SM", "NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE", "NVTE_APPLY_QK_LAYER_SCALING"),
    ),
    "it fuses operations, which rounds elsewhere; keep it equal": (
        *("NVTE_GEMM_GELU_FUSION", "NVTE_BIAS_GELU_NVFUSION", "NVTE_BIAS_DROPOUT_FUSION"),
        *("NVTE_MASKED_SOFTMAX_FUSION", "NVTE_TORCH_COMPILE", "NVTE_FUSED_MLA_Q_UPROJ"),
    ),
    "it chooses the kernels of grouped products and routing; keep it equal": (
        *("NVTE_USE_CUTLASS_GROUPED_GEMM", "NVTE_GROUPED_LINEAR_SINGLE_PARAM"),
        *("NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM", "NVTE_CUTEDSL_FUSED_GROUPED_MLP"),
        *("NVTE_DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP", "NVTE_RADIX_TOPK_THRESHOLD"),
        *("NVTE_ENABLE_CUTEDSL_BACKEND", "NVTE_CUTEDSL_FUSED_GROUPED_MLP_FC1_GLU_RHT_AMAX_TMEM"),
    ),
    "it chooses how communication overlaps with products; keep it equal": (
        *("NVTE_BATCH_MHA_P2P_COMM", "NVTE_RS_STRIDED_ATOMIC", "NVTE_AG_P2P_MULTI_ATOMIC", "UB_SKIPMC"),
    ),
    "it changes which kernels run, compiled when they are needed or before; keep it equal": (
        *("NVTE_USE_PYTORCH_TRITON", "NVTE_DISABLE_NVRTC", "NVTE_PLUGIN"),
    ),
}

_LOGS: tuple[Setting, ...] = tuple(
    _te(
        name=name,
        per_node=True,
        between_runs=Between.RECORDED,
        source="TransformerEngine 2.x",
        remedy="it steers the log, which names the backend that attention selected",
    )
    for name in ("NVTE_DEBUG", "NVTE_DEBUG_LEVEL")
)

TRANSFORMER_ENGINE_SETTINGS: tuple[Setting, ...] = (
    _te(
        name="transformer_engine.enforce_deterministic",
        kind=Kind.FLAG,
        pattern="True|not imported",
        recommended="True",
        between_runs=Between.RECORDED,
        source="TransformerEngine 2.x, pytorch/triton/mhc.py, ENFORCE_DETERMINISTIC",
        remedy="False means that TransformerEngine was imported before NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
    ),
    Setting(
        name="FLASH_ATTENTION_DETERMINISTIC",
        pattern="1",
        recommended="1",
        between_runs=Between.REPORTED,
        read_at=ReadAt.MODEL_BUILD,
        reader="transformers",
        source="transformers, modeling_flash_attention_utils.py; not verified here",
        remedy="flash-attn's backward pass adds by atomics unless it is asked to be deterministic",
    ),
    _te(
        name="NVTE_DISABLE_TRITON_AUTOTUNING",
        recommended="1",
        source="TransformerEngine 2.x; Megatron-core, ssm/ops/common/determinism.py",
        remedy="kernels that are chosen by timing differ between runs; 1 keeps one of them",
    ),
    *(
        _te(name=name, source="TransformerEngine 2.x", remedy=change)
        for change, names in _CHANGES_BITS.items()
        for name in names
    ),
    *_LOGS,
)

TRANSFORMER_ENGINE_FAMILIES: tuple[Family, ...] = (
    Family(
        prefix="NVTE_",
        read_at=ReadAt.TE_IMPORT,
        reader="TransformerEngine",
        documented=frozenset({"NVTE_FUSED_ATTN_BACKEND", "NVTE_FUSED_ATTN_FORCE_WORKSPACE_OPT", "NVTE_UB_SPLIT_AG"}),
    ),
)
