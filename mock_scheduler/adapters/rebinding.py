"""Puts names of a framework's module in the place of others for a while, where it has no official seam."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def standing_for(module: ModuleType, names: Mapping[str, object]) -> Iterator[None]:
    """Let these names of a module be other objects within the block, and its own again behind it."""
    original = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in original.items():
            setattr(module, name, value)
