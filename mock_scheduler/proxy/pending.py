"""Batches that the real scheduler gave and the pipeline does not have yet.

Contract: a batch is here from the moment in which the real scheduler returned it until the pipeline gets it, whatever
fails or is cancelled in between: its scheduler has gone on and would give the next one. What was learned about it on
the way (its recorded form, metrics, scheduler state) stays with it, so that nothing is asked for or written twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import SchedulerError
from mock_scheduler.proxy.checks import read_metrics, read_state
from mock_scheduler.proxy.routing import RequestKey, request_key
from mock_scheduler.scheduler import NativeBatch, RolloutRequest
from mock_scheduler.support.digests import JSON


@dataclass(kw_only=True, slots=True)
class Taken:
    """One batch, as the real scheduler gave it, and how far its way to the pipeline has come.

    ``batch``: its recorded form, once examined. ``measured`` and ``scheduler_state``: what the real scheduler said
    right after it, once asked. ``is_submitted``: whether the writer has it.
    """

    request: RolloutRequest
    native: NativeBatch
    batch: RolloutBatch | None = None
    measured: Mapping[str, float] | None = None
    scheduler_state: Mapping[str, JSON] | None = None
    is_submitted: bool = False

    def note_metrics(self, owner: str, told: object) -> None:
        """What ``collect_metrics`` of class ``owner`` returned; raises as ``read_metrics``."""
        self.measured = read_metrics(told, owner, self.request)

    def note_state(self, owner: str, told: object) -> None:
        """What ``state_dict`` of class ``owner`` returned; raises as ``read_state``."""
        self.scheduler_state = read_state(told, owner, self.request)


class TakenBatches:
    """At most one per step of each kind and scheduler."""

    def __init__(self) -> None:
        self._by_step: dict[RequestKey, Taken] = {}

    def add(self, request: RolloutRequest, native: NativeBatch) -> None:
        """The real scheduler answered ``request``."""
        self._by_step[request_key(request)] = Taken(request=request, native=native)

    def find(self, request: RolloutRequest) -> Taken | None:
        """The batch that was played for this very request, if any.

        Raises ``SchedulerError`` naming what differs where it was played for another request of the step.
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
        """The pipeline has the batch, or it is not what was asked for."""
        self._by_step.pop(request_key(request), None)

    def clear(self) -> None:
        """The run goes on from elsewhere, or ends."""
        self._by_step.clear()


def _differences(played: RolloutRequest, asked: RolloutRequest) -> str:
    names = [field.name for field in fields(RolloutRequest)]
    pairs = [(name, getattr(played, name), getattr(asked, name)) for name in names]
    return "; ".join(f"{name} was {before!r}, now {now!r}" for name, before, now in pairs if before != now)


HeldCall: TypeAlias = tuple[str, tuple[object, ...]]


class HeldCalls:
    """Of ``suspend``, ``resume`` and ``update_weights``."""

    def __init__(self) -> None:
        self._held: deque[HeldCall] = deque()
        self._missed_version: int | None = None
        self._missed_resume = False
        #: Whether the real scheduler is generating, as far as calls that reached it say.
        self.is_running = False

    def __bool__(self) -> bool:
        return bool(self._held) or self._missed_version is not None or self._missed_resume

    def hold(self, name: str, arguments: tuple[object, ...]) -> None:
        """Keep a call until it is known what the next answer is."""
        self._held.append((name, arguments))

    def suppress(self) -> list[str]:
        """The next answer is replayed: what was held has no effect. Returns the names of these calls."""
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
        """What the real scheduler must have before ``coming``, one call at a time; None where nothing is left.

        A suppressed weight update or ``resume`` is left out where a later call does the same or undoes it. The call
        stays due until ``delivered`` says that it was made.
        """
        names = {name for name, _ in self._held} | {coming}
        if "update_weights" in names:
            self._missed_version = None
        if names & {"suspend", "resume"} or self.is_running:
            self._missed_resume = False
        if self._missed_version is not None:
            return "update_weights", (self._missed_version,)
        if self._held:
            return self._held[0]
        return ("resume", ()) if self._missed_resume else None

    def delivered(self, call: HeldCall) -> None:
        """``call`` reached the real scheduler."""
        name, _ = call
        if self._held and self._held[0] is call:
            self._held.popleft()
        elif name == "update_weights":
            self._missed_version = None
        else:
            self._missed_resume = False
        if name in ("suspend", "resume"):
            self.is_running = name == "resume"
