"""TRL's GRPOTrainer and AsyncGRPOTrainer with recorded rollouts (``docs/frameworks/trl.md``).

Importing this imports neither torch nor TRL; its names do, when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mock_scheduler.adapters.trl.asynchronous import AsyncRollouts
    from mock_scheduler.adapters.trl.codec import TrlCodec
    from mock_scheduler.adapters.trl.rollouts import Rollouts
    from mock_scheduler.adapters.trl.samples import SampleCodec
    from mock_scheduler.adapters.trl.trace import trace_callback

__all__ = ["AsyncRollouts", "Rollouts", "SampleCodec", "TrlCodec", "trace_callback"]

_MODULES = {
    "AsyncRollouts": "asynchronous",
    "Rollouts": "rollouts",
    "SampleCodec": "samples",
    "TrlCodec": "codec",
    "trace_callback": "trace",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
