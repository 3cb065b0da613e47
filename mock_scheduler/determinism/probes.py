"""Probes read every flag and version of the settings table back in this process.

Contract: a probe takes the environment and returns the value in effect; ``None``: there is none here. Probes draw from
no global random generator, change no state and communicate with nobody. They import no library of their own accord: a
library that the program has not imported is ``not imported``.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.utils.deterministic

from mock_scheduler.determinism.settings.machine import APEX_MODULES, PACKAGES
from mock_scheduler.support.versions import read_package_version

NOT_IMPORTED = "not imported"
Probe = Callable[[Mapping[str, str]], object]

_DRIVER_VERSION = Path("/proc/driver/nvidia/version")


def read_flags(environ: Mapping[str, str]) -> dict[str, str]:
    """Reads every flag and version on which ranks must agree, as text; ``absent`` where there is none."""
    return _read(PROBES, environ)


def read_node_flags(environ: Mapping[str, str]) -> dict[str, str]:
    """Reads the flags of this node."""
    return _read(NODE_PROBES, environ)


def _read(probes: Mapping[str, Probe], environ: Mapping[str, str]) -> dict[str, str]:
    values = {name: probe(environ) for name, probe in probes.items()}
    return {name: "absent" if value is None else str(value) for name, value in values.items()}


def installed_versions() -> dict[str, str]:
    """Reads the versions of installed packages of the table by plain name (``megatron-core``), ``cudnn`` among them."""
    found = {name.removeprefix("version."): read_package_version(*names) for name, names in PACKAGES.items()}
    found["cudnn"] = _cudnn_version()
    return {name: value for name, value in found.items() if value is not None}


def gpu_capability(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Reads the compute capability of this rank's GPU; ``None`` on the CPU."""
    properties = _gpu(environ)
    return None if properties is None else (properties.major, properties.minor)


def _cudnn_version() -> str | None:
    """Returns ``9.18.1`` of cuDNN's 91801 (since version 9: major 10000, minor 100)."""
    number: int | None = torch.backends.cudnn.version()
    if number is None:
        return None
    major_unit = 10_000 if number >= 90_000 else 1_000
    return f"{number // major_unit}.{number % major_unit // 100}.{number % 100}"


def _string_hash(environ: Mapping[str, str]) -> object:
    """Hashes a text where the seed is fixed: otherwise it differs in every process by design."""
    return hash("mock_scheduler") if environ.get("PYTHONHASHSEED", "").isdecimal() else "random"


def _legacy_precision(read: Callable[[], object]) -> Probe:
    def probe(environ: Mapping[str, str]) -> object:
        try:
            return read()
        except RuntimeError:  # torch 2.9 and later refuse the old flag where the new one, fp32_precision, was set
            return "see fp32_precision"

    return probe


def _optional(module: object, *names: str) -> object:
    """Reads ``module.a.b``; ``None`` where this version of the library has no name like it.

    For names missing from some supported versions: ``fp32_precision`` came with torch 2.9, ``allow_fp16_accumulation``
    with 2.7.
    """
    for name in names:
        if not hasattr(module, name):
            return None
        module = getattr(module, name)
    return module


def _backend(*names: str) -> Probe:
    return lambda environ: _optional(torch.backends, *names)


def _inductor(name: str) -> Probe:
    def probe(environ: Mapping[str, str]) -> object:
        config = sys.modules.get("torch._inductor.config")
        return NOT_IMPORTED if config is None else _optional(config, name)

    return probe


def _enforce_deterministic(environ: Mapping[str, str]) -> object:
    module = sys.modules.get("transformer_engine.pytorch.triton.mhc")
    return NOT_IMPORTED if module is None else module.ENFORCE_DETERMINISTIC


def _file_digest(variable: str) -> Probe:
    def probe(environ: Mapping[str, str]) -> object:
        path = environ.get(variable)
        if not path:
            return None
        try:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError as error:
            return f"cannot be read: {error.strerror}"

    return probe


def _fills_uninitialized_memory(environ: Mapping[str, str]) -> object:
    return torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def _plain_name(member: object) -> str:
    """Returns ``Cublas`` of ``_BlasBackend.Cublas``."""
    return str(member).rpartition(".")[2]


def _cpu_probe(environ: Mapping[str, str]) -> str:
    """Digests the results of a few operations on fixed inputs, on one thread.

    Measured: ``ATEN_CPU_CAPABILITY`` changes randn and softmax, ``ONEDNN_MAX_CPU_ISA`` the bfloat16 product.
    """
    # On two threads exp differed in one process of five; the flag torch.num_threads covers the threads.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _digest_of_operations()
    finally:
        torch.set_num_threads(num_threads)


def _digest_of_operations() -> str:
    generator = torch.Generator().manual_seed(20_200)
    left = torch.randn(48, 96, generator=generator, dtype=torch.float32)
    right = torch.randn(96, 48, generator=generator, dtype=torch.float32)
    results = [
        left,
        torch.softmax(left * 8, dim=-1),
        torch.nn.functional.layer_norm(left, (96,)),
        left @ right,
        (left.bfloat16() @ right.bfloat16()).float(),
        left.exp().sum(dim=0),
    ]
    digest = hashlib.sha256()
    for result in results:
        digest.update(result.numpy().tobytes())
    return digest.hexdigest()[:16]


def _gpu(environ: Mapping[str, str]) -> torch._C._CudaDeviceProperties | None:
    """Reads properties of this rank's GPU, by ``LOCAL_RANK``; ``None`` without CUDA, or without a GPU of its own."""
    index = int(environ.get("LOCAL_RANK", "0"))
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    return torch.cuda.get_device_properties(index)


def _gpu_capability(environ: Mapping[str, str]) -> object:
    capability = gpu_capability(environ)
    return None if capability is None else f"{capability[0]}.{capability[1]}"


def _nccl_version(environ: Mapping[str, str]) -> object:
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _driver_version(environ: Mapping[str, str]) -> object:
    if not _DRIVER_VERSION.is_file():
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER_VERSION.read_text(encoding="utf-8"))
    return found and found.group(1)


_FLAGS: dict[str, Probe] = {
    "python.hash_randomization": lambda environ: bool(sys.flags.hash_randomization),
    "python.string_hash": _string_hash,
    "torch.deterministic_algorithms": lambda environ: torch.are_deterministic_algorithms_enabled(),
    "torch.deterministic_warn_only": lambda environ: torch.is_deterministic_algorithms_warn_only_enabled(),
    "torch.fill_uninitialized_memory": _fills_uninitialized_memory,
    "torch.default_dtype": lambda environ: torch.get_default_dtype(),
    "torch.num_threads": lambda environ: torch.get_num_threads(),
    "torch.cpu_probe": _cpu_probe,
    "torch.cudnn.deterministic": lambda environ: torch.backends.cudnn.deterministic,
    "torch.cudnn.benchmark": lambda environ: torch.backends.cudnn.benchmark,
    "torch.cudnn.allow_tf32": _legacy_precision(lambda: torch.backends.cudnn.allow_tf32),
    "torch.cuda.matmul.allow_tf32": _legacy_precision(lambda: torch.backends.cuda.matmul.allow_tf32),
    "torch.float32_matmul_precision": _legacy_precision(torch.get_float32_matmul_precision),
    "torch.cuda.matmul.fp32_precision": _backend("cuda", "matmul", "fp32_precision"),
    "torch.cudnn.conv.fp32_precision": _backend("cudnn", "conv", "fp32_precision"),
    "torch.mkldnn.matmul.fp32_precision": _backend("mkldnn", "matmul", "fp32_precision"),
    "torch.cuda.matmul.allow_bf16_reduced_precision_reduction": lambda environ: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "torch.cuda.matmul.allow_fp16_reduced_precision_reduction": lambda environ: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "torch.cuda.matmul.allow_fp16_accumulation": _backend("cuda", "matmul", "allow_fp16_accumulation"),
    "torch.cuda.preferred_blas_library": lambda environ: _plain_name(torch.backends.cuda.preferred_blas_library()),
    "torch.sdp.flash": lambda environ: torch._C._get_flash_sdp_enabled(),
    "torch.sdp.mem_efficient": lambda environ: torch._C._get_mem_efficient_sdp_enabled(),
    "torch.sdp.math": lambda environ: torch._C._get_math_sdp_enabled(),
    "torch.sdp.cudnn": lambda environ: torch._C._get_cudnn_sdp_enabled(),
    "torch.inductor.max_autotune": _inductor("max_autotune"),
    "torch.inductor.coordinate_descent_tuning": _inductor("coordinate_descent_tuning"),
    "torch.inductor.deterministic": _inductor("deterministic"),
    "transformer_engine.enforce_deterministic": _enforce_deterministic,
    "nccl.topo_file_sha256": _file_digest("NCCL_TOPO_FILE"),
    "nccl.graph_file_sha256": _file_digest("NCCL_GRAPH_FILE"),
}

_VERSIONS: dict[str, Probe] = {
    "version.python": lambda environ: platform.python_version(),
    "version.torch": lambda environ: torch.__version__,
    "version.torch_git": lambda environ: torch.version.git_version,
    "version.cuda": lambda environ: torch.version.cuda,
    "version.cudnn": lambda environ: _cudnn_version(),
    "version.nccl": _nccl_version,
    "version.nvidia_driver": _driver_version,
    "version.cpu_capability": lambda environ: torch.backends.cpu.get_cpu_capability(),
    "version.gpu": lambda environ: None if (gpu := _gpu(environ)) is None else gpu.name,
    "version.gpu_capability": _gpu_capability,
    "version.gpu_multiprocessors": lambda environ: (
        None if (gpu := _gpu(environ)) is None else gpu.multi_processor_count
    ),
}


def _package_probe(distributions: tuple[str, ...]) -> Probe:
    return lambda environ: read_package_version(*distributions)


def _module_probe(module: str) -> Probe:
    return lambda environ: "present" if find_spec(module) else None


PROBES: dict[str, Probe] = {
    **_FLAGS,
    **_VERSIONS,
    **{name: _package_probe(distributions) for name, distributions in PACKAGES.items()},
    **{name: _module_probe(module) for name, module in APEX_MODULES.items()},
}

NODE_PROBES: dict[str, Probe] = {"torch.num_interop_threads": lambda environ: torch.get_num_interop_threads()}
