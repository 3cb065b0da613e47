"""One call, or one object, attaches to the training loops of Megatron-LM and Megatron-Bridge.

``tests/integrations`` runs the real ones; here stands a module in the place of one without callbacks."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mock_scheduler.config.instruments import RUN_FILE_VARIABLE
from mock_scheduler.errors import ConfigError
from mock_scheduler.megatron import training_loops
from mock_scheduler.megatron.attached import NOT_ATTACHED
from mock_scheduler.megatron.training_loops import AttachCallback, attach_to_pretrain
from tests.megatron.callback_loops import MEGATRON_BRIDGE, MEGATRON_LM, BridgeContext, Context, StandInManager


@pytest.mark.parametrize("events", [MEGATRON_LM, MEGATRON_BRIDGE], ids=["Megatron-LM", "Megatron-Bridge"])
def test_it_attaches_once_when_the_training_starts(events: tuple[str, ...], attached: list[tuple[Any, ...]]) -> None:
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


def test_without_a_run_file_no_event_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_FILE_VARIABLE, raising=False)
    manager, context = StandInManager(MEGATRON_LM, [AttachCallback()]), Context(model=["chunk"], optimizer="optimizer")
    for event in MEGATRON_LM:
        manager.fire(event, context)
    assert vars(context) == vars(Context(model=["chunk"], optimizer="optimizer"))


def test_the_vocabulary_is_what_the_loop_says(attached: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(vocab_size=1000)
    AttachCallback().on_train_start(BridgeContext(state=SimpleNamespace(cfg=SimpleNamespace(model=model))))
    loop = ModuleType("megatron.training.global_vars")
    vars(loop)["get_tokenizer"] = lambda: SimpleNamespace(vocab_size=127)
    monkeypatch.setitem(sys.modules, loop.__name__, loop)
    AttachCallback().on_train_start(Context())

    def refuse() -> None:
        raise AssertionError("tokenizer is not initialized.")

    vars(loop)["get_tokenizer"] = refuse
    AttachCallback().on_train_start(Context())
    monkeypatch.delitem(sys.modules, loop.__name__)
    AttachCallback().on_train_start(Context())
    assert [call[-1]["vocab_size"] for call in attached] == [1000, 127, None, None]


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

    def attach(*args: Any, **keywords: Any) -> Any:
        calls.append((*args, keywords))
        return NOT_ATTACHED

    monkeypatch.setattr(training_loops, "attach", attach)
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
