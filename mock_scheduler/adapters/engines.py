"""Attaches the instruments to a training engine of others that keeps its model chunks and its optimizer to itself.

Contract: an engine of the returned class is the given one. Before its first training call it is attached to
(``megatron.attach``): by then weights and checkpoints are loaded, and every rank is at the same place. Reduced
gradients are read when ``optimizer.step`` begins, so it is all the same whether a schedule reduces them or, as in
SkyRL, a call of its own after several schedules. Where ``MOCK_SCHEDULER_RUN`` names no run file, nothing is hooked.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar, cast

from mock_scheduler import megatron
from mock_scheduler.adapters.settings import ABSENT, read_key
from mock_scheduler.config.instruments import RUN_FILE_VARIABLE
from mock_scheduler.errors import ConfigError
from mock_scheduler.megatron.attached import NOT_ATTACHED

Engine = TypeVar("Engine", bound=type)
_PREFIX = "Traced"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """Where an engine keeps what is attached to: dotted names of attributes.

    ``trains``: its method that makes forward and backward passes of an update. ``vocab_size``: without padding; None:
    the run file's, else the model's own.
    """

    trains: str
    chunks: str
    optimizer: str
    vocab_size: str | None = None


def with_trace(engine: Engine, parts: EngineParts) -> Engine:
    """Return a class of this engine that is attached to before it first trains.

    Raises:
        ConfigError: the engine has no such method.
    """
    train: Any = getattr(engine, parts.trains, None)
    if not callable(train):
        raise ConfigError(
            f"{engine.__module__}.{engine.__name__} has no method {parts.trains}: the instruments cannot be attached "
            "to this release. The adapter was written for the one that mock-scheduler frameworks lists"
        )

    @functools.wraps(train)
    def attached(self: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - the engine's own
        if "_mock_scheduler_run" not in vars(self):
            self._mock_scheduler_run = _attach(self, parts)
        return train(self, *arguments, **options)

    return cast(
        "Engine",
        type(f"{_PREFIX}{engine.__name__}", (engine,), {parts.trains: attached, "__module__": engine.__module__}),
    )


def _attach(engine: object, parts: EngineParts) -> object:
    if not os.environ.get(RUN_FILE_VARIABLE):
        return NOT_ATTACHED
    found = {name: read_key(engine, name) for name in (parts.chunks, parts.optimizer)}
    missing = [name for name, value in found.items() if value is ABSENT or value is None]
    if missing:
        raise ConfigError(
            f"{type(engine).__name__} has no {' and no '.join(missing)} when it trains: it trains by another engine "
            f"than Megatron-core, or this release keeps them elsewhere. Leave {RUN_FILE_VARIABLE} out"
        )
    vocab_size = None if parts.vocab_size is None else read_key(engine, parts.vocab_size, None)
    return megatron.attach(found[parts.chunks], found[parts.optimizer], vocab_size=vocab_size)


def find_traced(module: str, name: str, engines: str, parts: EngineParts) -> type:
    """Return the class ``Traced…`` of an adapter's module: of the engine so named, by which a worker can import it.

    Args:
        module: the adapter's.
        name: of the class that is asked for.
        engines: the framework's module, which is imported only now.

    Raises:
        AttributeError: the name is none.
        ConfigError: the engine has no such method.
    """
    engine_name = name.removeprefix(_PREFIX)
    if engine_name == name or name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    engine: type = getattr(import_module(engines), engine_name)
    traced = with_trace(engine, parts)
    traced.__module__ = module
    setattr(sys.modules[module], name, traced)
    return traced
