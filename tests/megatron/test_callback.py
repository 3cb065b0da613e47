"""One object attaches through the callbacks of Megatron-LM's and Megatron-Bridge's training loops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from mock_scheduler.megatron import callback
from mock_scheduler.megatron.callback import AttachCallback

MEGATRON_LM = (
    *("on_setup_start", "on_data_init_start", "on_train_start", "on_train_step_start", "on_train_step_end", "on_log"),
    *("on_train_end", "on_eval_start", "on_eval_step_start", "on_eval_step_end", "on_eval_end"),
    *("on_test_start", "on_test_step_start", "on_test_step_end", "on_test_end"),
)
MEGATRON_BRIDGE = (
    *(event for event in MEGATRON_LM if event not in ("on_setup_start", "on_log")),
    *("on_checkpoint_save", "on_checkpoint_load"),
)


@dataclass(kw_only=True)
class Context:
    """As the loops give it: no model before the setup."""

    model: list[str] | None = None
    optimizer: str | None = None
    scheduler: str | None = None
    user_state: dict[str, Any] = field(default_factory=dict)


class StandInManager:
    """Registers the bound methods of an object that are named after events, as both managers do."""

    def __init__(self, events: tuple[str, ...], callbacks: list[object]) -> None:
        named = {event: [getattr(item, event, None) for item in callbacks] for event in events}
        self._methods = {event: [item for item in found if item is not None] for event, found in named.items()}
        assert all(method.__func__ is not None for methods in self._methods.values() for method in methods)

    def fire(self, event: str, context: Context) -> None:
        for method in self._methods[event]:
            method(context)


@pytest.mark.parametrize("events", [MEGATRON_LM, MEGATRON_BRIDGE], ids=["Megatron-LM", "Megatron-Bridge"])
def test_it_attaches_once_when_the_training_starts(events: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    attached: list[tuple[Any, ...]] = []
    monkeypatch.setattr(callback, "attach", lambda *args, **keywords: attached.append((*args, keywords)))
    manager = StandInManager(events, [AttachCallback(vocab_size=127, run="run.json")])
    context = Context()
    before = [event for event in ("on_setup_start", "on_data_init_start") if event in events]
    for event in before:
        manager.fire(event, context)
    assert attached == []
    context.model, context.optimizer = ["first chunk", "second chunk"], "optimizer"
    for event in events[len(before) :]:
        manager.fire(event, context)
    keywords = {"vocab_size": 127, "prefix": "", "run": "run.json"}
    assert attached == [(["first chunk", "second chunk"], "optimizer", keywords)]
