"""Puts other objects in the place of a framework's own for a while, where it has no official seam."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def standing_for(owner: ModuleType | type, names: Mapping[str, object]) -> Iterator[None]:
    """Let these names of a module or class be other objects within the block, and its own again behind it."""
    original = {name: getattr(owner, name) for name in names}
    try:
        for name, value in names.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in original.items():
            setattr(owner, name, value)
