"""What the proxy's core asks of its front end: to build, to call, to work, to keep others out.

Contract: the core is written once, as generators that yield effects and are sent their results; a front end carries the
effects out, synchronously or on an event loop. An effect that raises ends its flow, which does not see the error: so
no real scheduler's exception is touched on its way to the pipeline.
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
    """Make the real scheduler; the result is what ``make_real`` returns."""

    make_real: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of the real scheduler, synchronous or asynchronous; the result is what it returns.

    ``note`` is told of the result as soon as it is there, also where a cancellation then ends the flow.
    """

    method: SchedulerMethod
    arguments: tuple[object, ...] = ()
    note: Callable[[Any], None] | None = None

    def told(self, result: object) -> object:
        """``result``, once noted."""
        if self.note is not None:
            self.note(result)
        return result


@dataclass(frozen=True, slots=True)
class Work:
    """Compute, read or write, off the event loop where there is one; once begun it is always finished."""

    function: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Guarded:
    """Run a flow while no other one holds the same lock, which has a name or is that of a step; the result is the
    flow's."""

    lock: Literal["prepare", "play"] | RequestKey
    flow: Generator[Effect, Any, object]


Effect: TypeAlias = "Build | Call | Work | Guarded"
Flow: TypeAlias = Generator[Effect, Any, T]


def is_async(method: SchedulerMethod) -> bool:
    """Whether calling it is known to give a coroutine."""
    return inspect.iscoroutinefunction(method) or inspect.iscoroutinefunction(getattr(method, "__call__", None))  # noqa: B004


class LockTable(Generic[L]):
    """``make_lock`` makes one; any thread may ask."""

    def __init__(self, make_lock: Callable[[], L]) -> None:
        self._make_lock = make_lock
        self._locks: WeakValueDictionary[Hashable, L] = WeakValueDictionary()
        self._guard = threading.Lock()

    def of(self, name: Hashable) -> L:
        """The lock of this name: the same one as long as anyone uses it."""
        with self._guard:
            lock = self._locks.get(name)
            if lock is None:
                lock = self._locks[name] = self._make_lock()
            return lock


def is_raised_already(failure: BaseException, error: BaseException | None) -> bool:
    """Whether ``error``, with which a block ends, is the one of which ``failure``, raised by closing, only tells again.

    A writer raises its first error as it was, and later ones that have the first as their cause.
    """
    return error is not None and failure.__cause__ is not None and failure.__cause__ in (error, error.__cause__)
