"""verl's trainers with recorded rollouts (``docs/frameworks/verl.md``).

Importing this imports neither torch nor verl; its names do, when they are first used, which verl does by the
configuration's keys. Contract: a name is given only where this process may use it: see ``suppress.check_process``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mock_scheduler.adapters.verl.rollouts import AgentLoopManager

__all__ = ["AgentLoopManager"]

_MODULES = {"AgentLoopManager": "rollouts"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # verl asks for the class before it starts an engine, and makes an object of it after.
    import_module(f"{__name__}.suppress").check_process()
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
