"""What the proxy's core asks of its front end: to build, to call, to work, to keep others out.

Contract: the core is written once, as generators that yield effects and are sent their results; a front end carries the
effects out, synchronously or on an event loop. An effect that raises ends its flow, which does not see the error: so
no real scheduler's exception is touched on its way to the pipeline.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from mock_scheduler.proxy.routing import RequestKey
from mock_scheduler.scheduler import SchedulerMethod

T = TypeVar("T")


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
