"""Knows this package's version and place, and the versions of installed packages that take part in a run.

Contract: standard library only, every room can read them; imports none of the packages.
"""

from __future__ import annotations

import os
import site
import sysconfig
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import Distribution

VERSION = "0.1.0"
#: The name that this package is imported by.
PACKAGE = __name__.partition(".")[0]
#: The folder that holds the package: a checkout, or ``site-packages``.
ROOT = Path(__file__).parents[2]


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
    # Imported here: it costs more than all else that ``import mock_scheduler`` loads.
    from importlib import metadata

    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def read_package_versions() -> dict[str, str | None]:
    """The version of every package of ``DISTRIBUTIONS``; ``None`` where it is not installed."""
    return {name: read_package_version(*names) for name, names in DISTRIBUTIONS.items()}


@cache
def installed_folders() -> tuple[str, ...]:
    """The folders of Python itself and of installed packages, each with its links followed and a separator behind."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(dict.fromkeys(os.path.realpath(folder) + os.sep for folder in folders))


def read_all_versions() -> dict[str, str]:
    """Returns the version of every installed distribution, by its name in lower case."""
    from importlib import metadata  # as above

    pairs = (_read_name_and_version(found) for found in metadata.distributions())
    return {name.lower(): version for name, version in pairs if name}


def _read_name_and_version(found: Distribution) -> tuple[str | None, str]:
    # Python reads them as an e-mail, with a README as its body: 75 ms for 128 distributions, of these lines 5.
    head = (found.read_text("METADATA") or "").partition("\n\n")[0]
    fields = {key: value.strip() for key, _, value in (line.partition(":") for line in reversed(head.splitlines()))}
    if "Name" in fields and "Version" in fields:
        return fields["Name"], fields["Version"]
    return found.name, found.version
