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
from collections.abc import Callable
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

    ``trains``: its method that makes forward and backward passes of an update. ``engine``, ``made_by``: the attribute
    of a worker that is the engine, and the worker's method that makes it; None: the worker is the engine.
    """

    trains: str
    chunks: str
    optimizer: str
    engine: str | None = None
    made_by: str | None = None


def with_trace(worker: Engine, parts: EngineParts) -> Engine:
    """Return a class of this worker, whose engine is attached to before it first trains.

    Raises:
        ConfigError: the worker has no such method.
    """
    name = parts.made_by or parts.trains
    method: Any = getattr(worker, name, None)
    if not callable(method):
        raise ConfigError(
            f"{worker.__module__}.{worker.__name__} has no method {name}: the instruments cannot be attached to this "
            "release. The adapter was written for the one that mock-scheduler frameworks lists"
        )
    wrapped = _attaching(method, parts) if parts.made_by is None else _making(method, parts)
    # With what the framework has marked its method by.
    functools.update_wrapper(wrapped, method)
    traced = type(f"{_PREFIX}{worker.__name__}", (worker,), {name: wrapped, "__module__": worker.__module__})
    return cast("Engine", traced)


def _attaching(train: Callable[..., Any], parts: EngineParts) -> Callable[..., Any]:
    def attached(self: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - the engine's own
        if "_mock_scheduler_run" not in vars(self):
            self._mock_scheduler_run = _attach(self, parts)
        return train(self, *arguments, **options)

    return attached


def _making(make: Callable[..., Any], parts: EngineParts) -> Callable[..., Any]:
    def made(self: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - the worker's own
        result = make(self, *arguments, **options)
        engine: Any = read_key(self, str(parts.engine))
        train = getattr(engine, parts.trains)
        wrapped = _attaching(lambda _engine, *given, **named: train(*given, **named), parts)
        setattr(engine, parts.trains, functools.wraps(train)(functools.partial(wrapped, engine)))
        return result

    return made


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
    return megatron.attach(found[parts.chunks], found[parts.optimizer])


def find_traced(module: str, name: str, workers: str, parts: EngineParts) -> type:
    """Return the class ``Traced…`` of an adapter's module: of the worker so named, by which others can import it.

    Args:
        module: the adapter's.
        name: of the class that is asked for.
        workers: the framework's module, which is imported only now.

    Raises:
        AttributeError: the name is none.
        ConfigError: the worker has no such method.
    """
    worker_name = name.removeprefix(_PREFIX)
    if worker_name == name or name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    worker: type = getattr(import_module(workers), worker_name)
    traced = with_trace(worker, parts)
    traced.__module__ = module
    setattr(sys.modules[module], name, traced)
    return traced
