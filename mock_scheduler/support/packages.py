"""Versions of the installed packages that take part in a run.

Contract: standard library only; imports none of the packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

#: Package -> the distributions that may provide it; the first that is installed counts.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "transformer-engine": ("transformer-engine",),
    "safetensors": ("safetensors",),
    "numpy": ("numpy",),
    "flash-attn": ("flash-attn",),
    "flash-attn-3": ("flash-attn-3",),
    "causal-conv1d": ("causal-conv1d",),
    "mamba-ssm": ("mamba-ssm",),
    "triton": ("triton",),
    "cublas": ("nvidia-cublas", "nvidia-cublas-cu12"),
    "cudnn-frontend": ("nvidia-cudnn-frontend",),
    "deep-ep": ("deep-ep",),
}


def read_package_version(*distributions: str) -> str | None:
    """The version of the first installed one of these distributions; ``None`` where none is."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def read_package_versions() -> dict[str, str | None]:
    """The version of every package of ``DISTRIBUTIONS``; ``None`` where it is not installed."""
    return {name: read_package_version(*names) for name, names in DISTRIBUTIONS.items()}
