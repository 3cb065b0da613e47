"""ms-swift's Megatron trainers, with recorded rollouts and traced (``docs/frameworks/ms_swift.md``).

Importing this imports neither torch nor ms-swift; its names do, when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mock_scheduler.adapters.ms_swift.codec import SampleCodec
    from mock_scheduler.adapters.ms_swift.plugin import register
    from mock_scheduler.adapters.ms_swift.rollouts import Rollouts

__all__ = ["Rollouts", "SampleCodec", "register"]

_MODULES = {"Rollouts": "rollouts", "SampleCodec": "codec", "register": "plugin"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
