"""Lets TransformerEngine's and Megatron-Bridge's own classes be built where neither CUDA nor compiled kernels are.

``python -m tests.integrations.host_kernels FOLDER CASE ...`` builds and reads the models of ``built_models``.

The wheel of TransformerEngine has all of its Python; the compiled part is an extension of its own
(``transformer_engine_torch``). A module in its place has every name that the Python asks it for, and computes nothing:
layers, parameters and marks are theirs, a forward pass is an error.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

EXTENSION = "transformer_engine_torch"


class _Enumeration(type):
    """A class that has every member that is asked for, numbered in that order; a kernel where it is called."""

    @property
    def __members__(cls) -> dict[str, int]:
        return {name: value for name, value in vars(cls).items() if isinstance(value, int)}

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        value = len(cls.__members__)
        setattr(cls, name, value)
        return value

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"{cls.__name__}: no kernel of TransformerEngine is here")


class _Kernels(ModuleType):
    """The extension's place."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        kernel = _Enumeration(name, (), {})
        setattr(self, name, kernel)
        return kernel


def import_without_kernels() -> None:
    """Imports TransformerEngine; before megatron-core, which asks once whether it is there."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TransformerEngine's own: it loads no compiled library then
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # its first import misses the extension
        import transformer_engine.common as common
    common.load_framework_extension = lambda framework: None
    kernels = _Kernels(EXTENSION)
    kernels.__all__ = []  # type: ignore[attr-defined]
    sys.modules[EXTENSION] = kernels
    import transformer_engine.pytorch  # noqa: F401


@contextmanager
def building_layers() -> Iterator[None]:
    """In the block torch says that CUDA is there, which a layer of TransformerEngine asks when it is made."""
    with mock.patch("torch.cuda.is_available", return_value=True):
        yield


if __name__ == "__main__":
    import_without_kernels()
    from tests.integrations.built_models import build_cases

    build_cases(Path(sys.argv[1]), sys.argv[2:])
