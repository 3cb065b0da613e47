"""Loads verl's own rollout correction, as the peer of a benchmark.

It is no part of the project. It is installed in a folder of its own, with this environment's torch:

    pip install --no-deps --target FOLDER verl==0.9.1 tensordict pyvers cloudpickle importlib_metadata zipp

Its helper imports ``ray``, ``transformers``, ``codetiming`` and ``orjson`` at the top and uses none of them here; empty
modules stand in for the absent ones, in this process alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_STOOD_IN_FOR = ("ray", "transformers", "codetiming", "orjson")

VerlHelper = Callable[..., tuple[Any, Any, dict[str, float]]]


class _StandIn:
    """A class or a decorator that does nothing."""

    def __init__(self, *arguments: object, **named: object) -> None:
        pass

    def __call__(self, *arguments: object, **named: object) -> object:
        return arguments[0] if arguments and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn()


class _StandInModule(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a module has this one
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_StandIn,), {})


class _StandIns(MetaPathFinder, Loader):
    """Finds every module of the packages that are absent."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        is_ours = name.split(".")[0] in self._packages
        return ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def load_verl_helper(folder: Path) -> VerlHelper:
    """``compute_rollout_correction_and_rejection_mask`` of the release installed in ``folder``.

    Raises ``SystemExit`` where there is none.
    """
    if not (folder / "verl").is_dir():
        raise SystemExit(f"{folder} has no verl; install it as benchmarks/verl_peer.py says")
    # Last, so that this environment's own packages are found first.
    sys.path.append(str(folder))
    absent = [name for name in _STOOD_IN_FOR if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_StandIns(absent))
    helper: VerlHelper = importlib.import_module(
        "verl.trainer.ppo.rollout_corr_helper"
    ).compute_rollout_correction_and_rejection_mask
    return helper
