"""Lists settings of process and machine: hash seed, threads, vector kernels, installed versions and hardware.

Equal bits are promised only for equal versions on equal hardware.

"measured" in a source: on CPU with gloo, Megatron-core 0.16.1 with torch 2.13.0 and 0.19.2 with torch 2.14.1.
"""

from __future__ import annotations

from functools import partial

from mock_scheduler.determinism.settings.setting import Between, Kind, ReadAt, Setting
from mock_scheduler.support.versions import DISTRIBUTIONS

_cpu = partial(Setting, between_runs=Between.REPORTED, read_at=ReadAt.TORCH_IMPORT)
_python = partial(Setting, read_at=ReadAt.INTERPRETER, reader="Python")
_MKL_GUIDE, _DISPATCHER = "oneMKL developer guide", "oneDNN documentation, CPU dispatcher control"
_SPLIT_SUMS = "a sum is split over the threads, so their number must be fixed"
_CODE_PATH = "it selects the code path of products; keep it equal"

_THREADS: tuple[Setting, ...] = (
    _python(
        name="PYTHONHASHSEED",
        pattern=r"\d+",
        recommended="0",
        exported=True,
        between_runs=Between.MUST_MATCH,
        source="Python documentation, PYTHONHASHSEED",
        remedy="without a fixed number the order of sets of strings differs between processes",
    ),
    _python(
        name="python.hash_randomization",
        kind=Kind.FLAG,
        between_runs=Between.MUST_MATCH,
        source="Python documentation, sys.flags.hash_randomization",
        remedy="False proves that PYTHONHASHSEED=0 came before the interpreter",
    ),
    _python(
        name="python.string_hash",
        kind=Kind.FLAG,
        between_runs=Between.REPORTED,
        source="Python documentation, PYTHONHASHSEED",
        remedy="the hash of one string: differs where ranks or runs started with other seeds",
    ),
    *(
        Setting(
            name=name,
            pattern=r"[1-9]\d*",
            recommended="1",
            exported=True,
            between_runs=Between.MUST_MATCH,
            read_at=ReadAt.TORCH_IMPORT,
            reader=reader,
            source=source,
            remedy=_SPLIT_SUMS,
        )
        for name, reader, source in (
            ("OMP_NUM_THREADS", "OpenMP", "measured: LayerNorm gradients on CPU change with the number of threads"),
            ("MKL_NUM_THREADS", "MKL", "oneMKL developer guide, MKL_NUM_THREADS"),
        )
    ),
    Setting(
        name="torch.num_threads",
        kind=Kind.FLAG,
        between_runs=Between.MUST_MATCH,
        read_at=ReadAt.EVERY_CALL,
        reader="torch",
        source="torch.set_num_threads; measured: LayerNorm gradients on CPU change with it",
        remedy=_SPLIT_SUMS,
    ),
    Setting(
        name="torch.num_interop_threads",
        kind=Kind.FLAG,
        per_node=True,  # by default the number of cores of the node
        between_runs=Between.RECORDED,
        read_at=ReadAt.EVERY_CALL,
        reader="torch",
        source="torch.set_num_interop_threads",
        remedy="it sets how many operations run at once, not how one of them sums",
    ),
)

_KERNELS: tuple[Setting, ...] = (
    _cpu(
        name="ATEN_CPU_CAPABILITY",
        reader="torch",
        source="measured: default changes torch.randn, and avx2 against avx512 changes softmax",
        remedy="it selects the vector kernels; keep it equal",
    ),
    *(
        _cpu(name=name, reader=reader, source=source, remedy=_CODE_PATH)
        for name, reader, source in (
            ("MKL_CBWR", "MKL", f"{_MKL_GUIDE}, conditional numerical reproducibility; measured: changes bits"),
            ("MKL_ENABLE_INSTRUCTIONS", "MKL", f"{_MKL_GUIDE}, instruction set specific dispatching"),
            ("ONEDNN_MAX_CPU_ISA", "oneDNN", f"{_DISPATCHER}; measured: changes bfloat16 products on CPU"),
            ("DNNL_MAX_CPU_ISA", "oneDNN", f"{_DISPATCHER}, older name"),
        )
    ),
    _cpu(
        name="ONEDNN_DEFAULT_FPMATH_MODE",
        reader="oneDNN",
        source="oneDNN documentation, floating-point math mode",
        remedy="it lets float32 products run in bfloat16 or TF32; keep it equal",
    ),
    _cpu(
        name="OPENBLAS_CORETYPE",
        reader="OpenBLAS",
        source="OpenBLAS documentation, run-time variables",
        remedy=_CODE_PATH,
    ),
    _cpu(
        name="torch.cpu_probe",
        kind=Kind.FLAG,
        reader="torch",
        source="measured: the settings above change one or more of its operations",
        remedy="a digest of what randn, softmax, layer norm and products compute; equal where the CPU kernels are",
    ),
    _cpu(
        name="version.cpu_capability",
        kind=Kind.VERSION,
        reader="torch",
        source="torch.backends.cpu.get_cpu_capability",
        remedy="it selects the vector kernels; use machines with one instruction set, or ATEN_CPU_CAPABILITY",
    ),
)

PROCESS_SETTINGS: tuple[Setting, ...] = (*_THREADS, *_KERNELS)


# The packages that compute. torch has a row of its own, with its build; safetensors only stores.
_COMPUTING = (
    *("megatron-core", "transformer-engine", "flash-attn", "flash-attn-3", "causal-conv1d", "mamba-ssm", "triton"),
    *("numpy", "cublas", "cudnn-frontend", "deep-ep"),
)

#: Setting -> the distributions that may provide it.
PACKAGES: dict[str, tuple[str, ...]] = {f"version.{name}": DISTRIBUTIONS[name] for name in _COMPUTING}

# apex is not on PyPI, where another project has its name: so its extension modules are looked for.
APEX_MODULES: dict[str, str] = {
    "version.apex.fused_wgrad": "fused_weight_gradient_mlp_cuda",
    "version.apex.fused_layer_norm": "fused_layer_norm_cuda",
    "version.apex.persist_layer_norm": "fast_layer_norm",
    "version.apex.multi_tensor": "amp_C",
}

_HARDWARE: dict[str, str] = {
    "version.python": "platform.python_version",
    "version.torch": "torch.__version__, with its build such as +cpu",
    "version.torch_git": "torch.version.git_version",
    "version.cuda": "torch.version.cuda",
    "version.cudnn": "torch.backends.cudnn.version",
    "version.nccl": "torch.cuda.nccl.version",
    "version.nvidia_driver": "/proc/driver/nvidia/version",
    "version.gpu": "torch.cuda.get_device_properties: name",
    "version.gpu_capability": "torch.cuda.get_device_properties: major.minor",
    "version.gpu_multiprocessors": "cuBLAS documentation: bits only for the same number of multiprocessors",
}


def _version(name: str, source: str, remedy: str) -> Setting:
    return Setting(
        name=name,
        kind=Kind.VERSION,
        between_runs=Between.REPORTED,
        read_at=ReadAt.INSTALLED,
        reader="the program",
        source=source,
        remedy=remedy,
    )


_OTHER_BITS = "another version may sum in another order; where it differs, compare within rounding"

VERSION_SETTINGS: tuple[Setting, ...] = (
    *(_version(name, source, _OTHER_BITS) for name, source in _HARDWARE.items()),
    *(_version(name, f"package {' or '.join(names)}", _OTHER_BITS) for name, names in PACKAGES.items()),
    *(
        _version(name, f"apex's module {module}", "Megatron uses it where it is present, with other bits")
        for name, module in APEX_MODULES.items()
    ),
)
