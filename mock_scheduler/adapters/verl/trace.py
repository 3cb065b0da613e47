"""Traces the engines that verl trains with: FSDP2 by plain torch's hooks, Megatron by ``megatron.attach``.

verl makes every engine by its registry; the plugin of each worker stands before the engine's ``train_batch``. Contract:
an engine is attached to before it first trains: by then weights and checkpoints are loaded. One that never trains
(reference) is left alone. A policy's files are in ``trace_dir/actor``, a critic's in ``trace_dir/critic``. A step of
the trace is one update, so one mini-batch of verl.
Megatron's trace is asked for by a run file (``MOCK_SCHEDULER_RUN``), as for any training on Megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mock_scheduler import megatron
from mock_scheduler.adapters.verl.settings import VerlSettings
from mock_scheduler.plain_torch.tracing import trace_training

_ENGINES = "verl.workers.engine"
_CRITIC = "value_model"


def trace_engines(settings: VerlSettings | None, find: Callable[[str], Any] = import_module) -> Callable[[], None]:
    """Trace each engine that the registry makes from now on; returns what puts the registry back.

    ``find``: gives verl's modules by name.
    """
    registry = find(_ENGINES).EngineRegistry
    original = vars(registry)["new"]

    def new(owner: Any, model_type: str, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - verl's
        engine = original.__get__(None, owner)(model_type, *arguments, **options)
        train, attached = engine.train_batch, list[object]()

        def attach_and_train(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - verl's
            if not attached:
                attached.append(attach_engine(engine, is_critic=model_type == _CRITIC, settings=settings))
            return train(*given, **named)

        engine.train_batch = attach_and_train
        return engine

    registry.new = classmethod(new)
    return lambda: setattr(registry, "new", original)


def attach_engine(engine: Any, *, is_critic: bool, settings: VerlSettings | None) -> object:  # noqa: ANN401 - verl's
    """Attach to an engine that has built its model, and return what was attached; None where nothing was asked."""
    optimizer = engine.optimizer
    if isinstance(engine.module, torch.nn.Module):
        if settings is None or settings.trace_dir is None:
            return None
        folder = Path(settings.trace_dir) / ("critic" if is_critic else "actor")
        return trace_training(engine.module, optimizer, trace_dir=folder, trace=settings.trace)
    config = getattr(getattr(engine, "model_config", None), "hf_config", None)
    vocab_size = getattr(config, "vocab_size", None)
    return megatron.attach(list(engine.module), optimizer, vocab_size=vocab_size, prefix="critic." if is_critic else "")
