"""The real scheduler: built when it is first needed, and brought to where it would be had it answered all along.

Keeps whatever is on its way between pipeline and real scheduler: batches coming from it, calls going to it.

Contract: flows of ``effects`` and bookkeeping only.

- A batch is pending from its return by the real scheduler until the pipeline has it, whatever fails or is cancelled
  meanwhile: the scheduler has gone on and would give the next one. Its recorded form, metrics and scheduler state stay
  with it, so nothing is asked for or written twice.
- A call is pending until we know whether the next answer is live or replayed. It is then delivered, in order, before
  the live answer, or suppressed by the replayed one. The latest suppressed policy version, and whether the pipeline had
  resumed, are kept: a real scheduler that takes over later is brought to where it would be.
- A state to load stays due until the scheduler has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import SchedulerError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.checks import read_metrics, read_state
from mock_scheduler.proxy.effects import Build, Call, Flow, Guarded
from mock_scheduler.proxy.random_states import GeneratorWatch
from mock_scheduler.proxy.ray_calls import as_scheduler
from mock_scheduler.proxy.routing import RequestKey, request_key
from mock_scheduler.recording.step.step_info import GeneratorStates
from mock_scheduler.scheduler import NativeBatch, RolloutRequest, SchedulerMethod, SchedulerMethods, scheduler_methods
from mock_scheduler.support.digests import JSON

HeldCall: TypeAlias = tuple[str, tuple[object, ...]]


class RealScheduler:
    """The real scheduler, once built, with everything due to it.

    ``state``: the state to load before its next answer, out of a recording or a checkpoint; None where its own counts.
    ``calls``: calls of the pipeline that have not reached it. ``watch``: sees what it does to random generators.
    """

    def __init__(self, make_real: Callable[[], object], ledger: Ledger, watch: GeneratorWatch) -> None:
        self._make_real = make_real
        self._ledger = ledger
        self.watch = watch
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
        with self.watch.live_call():
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
            with self.watch.live_call():
                self._methods = scheduler_methods(as_scheduler((yield Build(self._make_real))))
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


class HeldCalls:
    """Calls that wait until we know whether the next answer is live or replayed.

    They are ``suspend``, ``resume`` and ``update_weights``.
    """

    def __init__(self) -> None:
        self._held: deque[HeldCall] = deque()
        self._missed_version: int | None = None
        self._missed_resume = False
        #: Whether the real scheduler is generating, as far as calls that reached it say.
        self.is_running = False

    def __bool__(self) -> bool:
        return bool(self._held) or self._missed_version is not None or self._missed_resume

    def hold(self, name: str, arguments: tuple[object, ...]) -> None:
        """Keep a call until the kind of the next answer is known."""
        self._held.append((name, arguments))

    def missed(self, version: int) -> None:
        """Note that the weights are of ``version``, of which only a process before this one was told."""
        if version and not any(name == "update_weights" for name, _ in self._held):
            self._missed_version = version

    def suppress(self) -> list[str]:
        """Drop all held calls, since the next answer is replayed; returns their names."""
        names = []
        while self._held:
            name, arguments = self._held.popleft()
            names.append(name)
            if name == "update_weights":
                self._missed_version = int(str(arguments[0]))
            else:
                self._missed_resume = name == "resume"
        return names

    def catch_up(self, coming: str | None) -> HeldCall | None:
        """Return the next call due to the real scheduler before ``coming``; None where nothing is left.

        A suppressed weight update or ``resume`` is left out where a later call repeats or undoes it. The call stays
        due until ``delivered`` notes it.
        """
        names = {name for name, _ in self._held} | {coming}
        # A later weight update replaces a missed one; a later suspend or resume decides alone whether it generates.
        if "update_weights" in names:
            self._missed_version = None
        if names & {"suspend", "resume"} or self.is_running:
            self._missed_resume = False
        # Weights come first: a resumed scheduler must not generate with old ones.
        if self._missed_version is not None:
            return "update_weights", (self._missed_version,)
        if self._held:
            return self._held[0]
        return ("resume", ()) if self._missed_resume else None

    def delivered(self, call: HeldCall) -> None:
        """Note a call that reached the real scheduler."""
        name, _ = call
        # ``is``: the held call itself, not a missed one that is equal to it.
        if self._held and self._held[0] is call:
            self._held.popleft()
        elif name == "update_weights":
            self._missed_version = None
        else:
            self._missed_resume = False
        if name in ("suspend", "resume"):
            self.is_running = name == "resume"


@dataclass(kw_only=True, slots=True)
class Taken:
    """One batch of the real scheduler, and how far it has come on its way to the pipeline.

    ``batch``: its recorded form, once examined. ``measured``, ``scheduler_state``: the real scheduler's metrics and
    state right after it, once asked for. ``random_states``: those of the random generators then, as they are recorded.
    ``is_submitted``: whether the writer has it.
    """

    request: RolloutRequest
    native: NativeBatch
    batch: RolloutBatch | None = None
    measured: Mapping[str, float] | None = None
    scheduler_state: Mapping[str, JSON] | None = None
    random_states: GeneratorStates | None = None
    is_submitted: bool = False

    def note_metrics(self, owner: str, value: object) -> None:
        """Keep the value returned by ``collect_metrics`` of class ``owner``; raises as ``read_metrics``."""
        self.measured = read_metrics(value, owner, self.request)

    def note_state(self, owner: str, value: object) -> None:
        """Keep the value returned by ``state_dict`` of class ``owner``; raises as ``read_state``."""
        self.scheduler_state = read_state(value, owner, self.request)


class TakenBatches:
    """Batches that the pipeline does not have yet, at most one per step of each kind and scheduler."""

    def __init__(self) -> None:
        self._by_step: dict[RequestKey, Taken] = {}

    def add(self, request: RolloutRequest, native: NativeBatch) -> None:
        """Keep the real scheduler's answer to ``request``."""
        self._by_step[request_key(request)] = Taken(request=request, native=native)

    def find(self, request: RolloutRequest) -> Taken | None:
        """Return the batch played for this very request, if any.

        Raises ``SchedulerError`` naming every difference where it was played for another request of the step.
        """
        taken = self._by_step.get(request_key(request))
        if taken is not None and taken.request != request:
            raise SchedulerError(
                f"{request.mode} step {request.global_step}: a batch that was played for this step has not reached the "
                f"pipeline, which now asks for another one: {_differences(taken.request, request)}. Ask as before to "
                "get it, or load the state of a checkpoint to play the step anew."
            )
        return taken

    def drop(self, request: RolloutRequest) -> None:
        """Forget a batch: the pipeline has it, or it is a wrong answer."""
        self._by_step.pop(request_key(request), None)

    def clear(self) -> None:
        """Forget all: the run goes on from elsewhere, or ends."""
        self._by_step.clear()


def _differences(played: RolloutRequest, asked: RolloutRequest) -> str:
    names = [field.name for field in fields(RolloutRequest) if field.compare]
    pairs = [(name, getattr(played, name), getattr(asked, name)) for name in names]
    return "; ".join(f"{name} was {before!r}, now {now!r}" for name, before, now in pairs if before != now)
