"""The callbacks of two training loops: stand-ins with the events and the contexts that their sources have, and
Megatron-Bridge's own, out of its file.

Megatron-LM after 0.19.2 (``megatron/training/callbacks.py``) keeps one context, and fires an event by its name alone;
Megatron-Bridge 0.6.2 (``megatron/bridge/training/callbacks.py``) makes a context for each event. Both register the
bound methods of an object that are not the base class's.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MEGATRON_LM = (
    *("on_setup_start", "on_data_init_start", "on_train_start", "on_train_step_start", "on_train_step_end", "on_log"),
    *("on_train_end", "on_eval_start", "on_eval_step_start", "on_eval_step_end", "on_eval_end"),
    *("on_test_start", "on_test_step_start", "on_test_step_end", "on_test_end"),
)
MEGATRON_BRIDGE = (
    *(event for event in MEGATRON_LM if event not in ("on_setup_start", "on_log")),
    "on_checkpoint_save",
)
#: The file of Megatron-Bridge's callbacks, for the tests that have its wheel.
FILE_VARIABLE = "BRIDGE_CALLBACKS"


@dataclass(kw_only=True)
class Context:
    """As Megatron-LM's loop gives it: no model before the setup, and no further state."""

    model: Any = None
    user_state: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    scheduler: Any = None
    loss_dict: dict[str, Any] | None = None
    grad_norm: float | None = None
    skipped_iter: bool | None = None


@dataclass(kw_only=True)
class BridgeContext(Context):
    """As Megatron-Bridge's loop gives it. state: its whole state."""

    state: Any = None


class StandInManager:
    """Registers the bound methods of an object that are named after events, as both managers do."""

    def __init__(self, events: tuple[str, ...], callbacks: list[object]) -> None:
        named = {event: [getattr(item, event, None) for item in callbacks] for event in events}
        self._methods = {event: [item for item in found if item is not None] for event, found in named.items()}
        assert all(method.__func__ is not None for methods in self._methods.values() for method in methods)

    def fire(self, event: str, context: Context) -> None:
        for method in self._methods[event]:
            method(context)


def start_loop(name: str, callback: object, chunks: Any, optimizer: Any, vocab_size: int) -> Callable[[str], None]:
    """Gives the function that a loop calls at its events; the name of a loop ends with the class of its manager."""
    state = SimpleNamespace(cfg=SimpleNamespace(model=SimpleNamespace(vocab_size=vocab_size)))
    given = {"model": chunks, "optimizer": optimizer, "scheduler": None}
    if name == "Megatron-LM":
        manager, context = StandInManager(MEGATRON_LM, [callback]), Context(**given)
        return lambda event: manager.fire(event, context)
    if name == "Megatron-Bridge":
        stand_in = StandInManager(MEGATRON_BRIDGE, [callback])
        return lambda event: stand_in.fire(event, BridgeContext(state=state, **given))
    module = load_callbacks(Path(name))
    real = module.normalize_callbacks([callback])
    assert frozenset(MEGATRON_BRIDGE) == module.VALID_EVENTS

    def fire(event: str) -> None:
        if module.should_fire(real, event):
            real.fire(event, module.CallbackContext(state=state, user_state=real.user_state, **given))

    return fire


def load_callbacks(path: Path) -> Any:
    """Loads Megatron-Bridge's file alone: importing its package runs all bridges, which need a GPU's kernels."""
    spec = importlib.util.spec_from_file_location("bridge_callbacks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
