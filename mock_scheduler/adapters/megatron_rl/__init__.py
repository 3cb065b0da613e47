"""megatron/rl, the reinforcement learning in Megatron-LM, with recorded rollouts (``docs/frameworks/megatron_rl.md``).

Importing this imports neither torch nor Megatron; its names do, when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mock_scheduler.adapters.megatron_rl.codec import GroupedRolloutsCodec
    from mock_scheduler.adapters.megatron_rl.rollouts import Rollouts, attach_rollouts

__all__ = ["GroupedRolloutsCodec", "Rollouts", "attach_rollouts"]

_MODULES = {"GroupedRolloutsCodec": "codec", "Rollouts": "rollouts", "attach_rollouts": "rollouts"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
