"""Installed packages and hardware: equal bits are promised only for equal versions on equal hardware."""

from __future__ import annotations

from mock_scheduler.determinism.settings.setting import Between, Kind, ReadAt, Setting
from mock_scheduler.support.packages import DISTRIBUTIONS

# Those that compute. torch has a row of its own, with its build; safetensors only stores.
_COMPUTING = (
    *("megatron-core", "transformer-engine", "flash-attn", "flash-attn-3", "causal-conv1d", "mamba-ssm", "triton"),
    *("numpy", "cublas", "cudnn-frontend", "deep-ep"),
)

#: Setting -> the distributions that may provide it.
PACKAGES: dict[str, tuple[str, ...]] = {f"version.{name}": DISTRIBUTIONS[name] for name in _COMPUTING}

# apex is not on PyPI, where another project has its name: its extension modules are what is looked for.
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
