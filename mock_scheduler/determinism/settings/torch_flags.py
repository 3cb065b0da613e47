"""Settings of torch's switches and of compilers choosing kernels by timing them."""

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

TORCH_FAMILIES: tuple[Family, ...] = (
    Family(prefix="TORCHINDUCTOR_", read_at=ReadAt.TORCH_IMPORT, reader="torch.compile"),
    Family(prefix="TRITON_AUTOTUNE_", read_at=ReadAt.TORCH_IMPORT, reader="Triton"),
    Family(
        prefix="TRITON_",
        read_at=ReadAt.TORCH_IMPORT,
        reader="Triton",
        between_runs=Between.RECORDED,
        per_node=True,
    ),
)
