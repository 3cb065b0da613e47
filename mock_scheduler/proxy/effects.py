"""Effects: the core of the proxy yields them, and a front end carries them out, synchronously or on an event loop.

Contract: the core is written once, as generators; the result of each effect is sent back into its generator. A failed
effect ends its flow, and the flow never sees the error: no exception of a real scheduler is touched on its way to the
pipeline.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from mock_scheduler.proxy.routing import RequestKey
from mock_scheduler.scheduler import SchedulerMethod

T = TypeVar("T")
L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class Build:
    """Make the real scheduler; the result is the value of ``make_real``."""

    make_real: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of the real scheduler, synchronous or asynchronous; the result is its return value.

    ``note`` gets the result as soon as it exists, also where a cancellation then ends the flow.
    """

    method: SchedulerMethod
    arguments: tuple[object, ...] = ()
    note: Callable[[Any], None] | None = None

    def noted(self, result: object) -> object:
        """Give ``result`` to ``note``, and return it."""
        if self.note is not None:
            self.note(result)
        return result


@dataclass(frozen=True, slots=True)
class Work:
    """Compute, read or write, off the event loop where there is one; once begun it is always finished."""

    function: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Guarded:
    """Run a flow under a lock, named or of one step; the result is the flow's."""

    lock: Literal["prepare", "play"] | RequestKey
    flow: Generator[Effect, Any, object]


Effect: TypeAlias = "Build | Call | Work | Guarded"
Flow: TypeAlias = Generator[Effect, Any, T]


def is_async(method: SchedulerMethod) -> bool:
    """Whether a call is known to give a coroutine."""
    return inspect.iscoroutinefunction(method) or inspect.iscoroutinefunction(getattr(method, "__call__", None))  # noqa: B004


class LockTable(Generic[L]):
    """Locks by name: made on demand by ``make_lock``, gone when nobody holds or awaits them. Any thread may ask."""

    def __init__(self, make_lock: Callable[[], L]) -> None:
        self._make_lock = make_lock
        # Weakly, since a long run asks for a lock for each of its steps.
        self._locks: WeakValueDictionary[Hashable, L] = WeakValueDictionary()
        self._guard = threading.Lock()

    def of(self, name: Hashable) -> L:
        """Return the lock of this name: the same one as long as anyone uses it."""
        with self._guard:
            lock = self._locks.get(name)
            if lock is None:
                lock = self._locks[name] = self._make_lock()
            return lock


def is_raised_already(failure: BaseException, error: BaseException | None) -> bool:
    """Whether ``failure``, raised while closing a block, only repeats ``error``, with which the block ends.

    A writer raises its first error unchanged; its later errors name the first one as their cause.
    """
    return error is not None and failure.__cause__ is not None and failure.__cause__ in (error, error.__cause__)
