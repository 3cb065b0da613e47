"""One call attaches to Megatron-LM's loop in a release without callbacks.

``tests/integrations`` runs the real one; here stands a module in its place.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mock_scheduler.errors import ConfigError
from mock_scheduler.megatron import pretrain
from mock_scheduler.megatron.pretrain import attach_to_pretrain


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
    monkeypatch.setattr(pretrain, "attach", lambda *args, **keywords: calls.append((*args, keywords)))
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
    monkeypatch.setattr(pretrain, "find_spec", lambda name: None)
    monkeypatch.setattr(pretrain, "installed_megatron", lambda: "0.16.1")
    with pytest.raises(ConfigError) as refused:
        attach_to_pretrain()
    assert str(refused.value) == (
        "megatron.attach_to_pretrain needs megatron.training, and megatron-core 0.16.1 has none: install "
        "megatron-core>=0.19.2 (Python 3.12), or Megatron-LM. A loop of your own calls "
        "megatron.attach(model_chunks, optimizer) instead"
    )
