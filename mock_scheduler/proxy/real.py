"""The real scheduler: built when it is first needed, and brought to where it would be had it answered all along.

Contract: flows of ``effects`` only. A state or a held call stays due until the scheduler has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.effects import Build, Call, Flow, Guarded
from mock_scheduler.proxy.pending import HeldCalls
from mock_scheduler.scheduler import SchedulerMethod, SchedulerMethods, scheduler_methods
from mock_scheduler.support.digests import JSON


class RealScheduler:
    """The real scheduler, once built, with everything due to it.

    ``state``: the state to load before its next answer, out of a recording or a checkpoint; None where its own counts.
    ``calls``: calls of the pipeline that have not reached it.
    """

    def __init__(self, make_real: Callable[[], object], ledger: Ledger) -> None:
        self._make_real = make_real
        self._ledger = ledger
        self._methods: SchedulerMethods | None = None
        self.calls = HeldCalls()
        self.state: Mapping[str, JSON] | None = None

    @property
    def is_built(self) -> bool:
        """Whether it is built yet."""
        return self._methods is not None

    @property
    def owner(self) -> str:
        """Its class, for messages; empty before it is built."""
        return "" if self._methods is None else self._methods.owner

    def prepare(self, coming: str | None) -> Flow[None]:
        """Bring it to where it would be, before the call ``coming``."""
        if self._methods is None or self.state is not None or self.calls:
            yield Guarded("prepare", self._catch_up(coming))

    def call(self, name: str, *arguments: object, note: Callable[[Any], None] | None = None) -> Flow[Any]:
        """Call one of its methods, or the substitute for one it lacks; ``note`` as in ``effects.Call``."""
        method = self.method(name)
        if self._methods is not None and name in self._methods.own:
            self._ledger.count("called", name)
        return (yield Call(method, arguments, note))

    def method(self, name: str) -> SchedulerMethod:
        """Return one of its methods by name, once it is prepared."""
        assert self._methods is not None  # flows prepare before they call
        return self._methods[name]

    def suppress_held(self) -> None:
        """Drop held calls, since the next answer is replayed."""
        for name in self.calls.suppress():
            self._ledger.count("suppressed", name)

    def _catch_up(self, coming: str | None) -> Flow[None]:
        if self._methods is None:
            self._methods = scheduler_methods((yield Build(self._make_real)))
            self._ledger.count("built", "scheduler")
        state = self.state
        if state:
            yield from self.call("load_state_dict", state)
        if self.state is state:
            self.state = None
        while (call := self.calls.catch_up(coming)) is not None:
            name, arguments = call
            yield from self.call(name, *arguments)
            self.calls.delivered(call)
