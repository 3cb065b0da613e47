"""One call, or one object, attaches to the training loops of Megatron-LM and Megatron-Bridge.

``tests/integrations`` runs the real ones; here stands a module in the place of one without callbacks."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mock_scheduler.errors import ConfigError
from mock_scheduler.megatron import training_loops
from mock_scheduler.megatron.training_loops import AttachCallback, attach_to_pretrain

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
    monkeypatch.setattr(training_loops, "attach", lambda *args, **keywords: attached.append((*args, keywords)))
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


def build_model_and_optimizer(optimizer: str | None = "optimizer", **unused: object) -> tuple[Any, ...]:
    return ["chunk"], optimizer, "scheduler"


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A ``megatron.training`` that has nothing but the function which builds model and optimizer."""
    package, module = ModuleType("megatron.training"), ModuleType("megatron.training.training")
    package.__spec__ = ModuleSpec("megatron.training", None)
    vars(module)["setup_model_and_optimizer"] = build_model_and_optimizer
    vars(package).update(training=module, get_tokenizer=lambda: SimpleNamespace(vocab_size=127))
    monkeypatch.setitem(sys.modules, "megatron.training", package)
    monkeypatch.setitem(sys.modules, "megatron.training.training", module)
    return module


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(training_loops, "attach", lambda *args, **keywords: calls.append((*args, keywords)))
    return calls


def test_it_attaches_behind_the_setup_with_the_tokenizers_vocabulary(
    loop: Any, attached: list[tuple[Any, ...]]
) -> None:
    attach_to_pretrain(prefix="actor.", run="run.json")
    assert attached == []
    assert loop.setup_model_and_optimizer(model_type="GPT") == (["chunk"], "optimizer", "scheduler")
    assert attached == [(["chunk"], "optimizer", {"vocab_size": 127, "prefix": "actor.", "run": "run.json"})]


def test_without_an_optimizer_nothing_is_attached(loop: Any, attached: list[tuple[Any, ...]]) -> None:
    attach_to_pretrain()
    assert loop.setup_model_and_optimizer(optimizer=None) == (["chunk"], None, "scheduler")
    assert attached == []


def test_a_second_call_is_refused(loop: Any) -> None:
    attach_to_pretrain()
    with pytest.raises(ConfigError, match="called twice: call it once, before pretrain"):
        attach_to_pretrain()


def test_a_release_without_the_loop_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_loops, "find_spec", lambda name: None)
    monkeypatch.setattr(training_loops, "installed_megatron", lambda: "0.16.1")
    with pytest.raises(ConfigError) as refused:
        attach_to_pretrain()
    assert str(refused.value) == (
        "megatron.attach_to_pretrain needs megatron.training, and megatron-core 0.16.1 has none: install "
        "megatron-core>=0.19.2 (Python 3.12), or Megatron-LM. A loop of your own calls "
        "megatron.attach(model_chunks, optimizer) instead"
    )
