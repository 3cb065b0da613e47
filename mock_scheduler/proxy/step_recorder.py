"""Records a live step, or compares it with the recorded one, once everything that belongs to it is there.

Contract: flows of ``effects`` and bookkeeping only. A step is its batch, the real scheduler's metrics and state right
after it, the states of random generators, and the values that the trainer computes from the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from mock_scheduler.batch.columns import RowValue
from mock_scheduler.errors import SchedulerError
from mock_scheduler.proxy.access import RecordingAccess
from mock_scheduler.proxy.effects import Flow, Work
from mock_scheduler.proxy.late_values import AwaitedStep, LateValues
from mock_scheduler.proxy.random_states import RecordedStates
from mock_scheduler.proxy.real_scheduler import RealScheduler, Taken
from mock_scheduler.proxy.routing import Route
from mock_scheduler.proxy.settings import ProxySettings
from mock_scheduler.recording.reading.reader import RecordedStep
from mock_scheduler.recording.step.step_info import GeneratorStates
from mock_scheduler.scheduler import RolloutRequest


class StepRecorder:
    """Records the steps of one proxy; ``late``: their late values."""

    def __init__(self, settings: ProxySettings, access: RecordingAccess, real: RealScheduler) -> None:
        self._settings = settings
        self._access = access
        self._real = real
        self.late = LateValues(settings.late_values)

    def record(self, taken: Taken, route: Route) -> Flow[dict[str, float]]:
        """Hand a step to the writer, at once or when its late values have come; returns its metrics."""
        # Asked for once per batch, on every rank: real schedulers may reset their metrics when asked.
        if taken.measured is None:
            yield from self._real.call("collect_metrics", note=partial(taken.note_metrics, self._real.owner))
        yield from self._ask_for_state(taken)
        assert taken.measured is not None
        metrics = dict(taken.measured)
        is_waiting = self.late.wait(AwaitedStep(taken=taken, route=route, metrics=metrics))
        if not is_waiting and not taken.is_submitted:
            yield Work(lambda: self._submit(taken, metrics))
        return metrics

    def verify(self, taken: Taken, route: Route) -> Flow[None]:
        """Compare a step, at once or when its late values have come."""
        yield from self._ask_for_state(taken)
        if not self.late.wait(AwaitedStep(taken=taken, route=route, metrics=None)):
            yield Work(lambda: self._compare(taken, route))

    def _compare(self, taken: Taken, route: Route, late_states: GeneratorStates | None = None) -> None:
        assert taken.batch is not None
        assert taken.scheduler_state is not None
        self._access.verify(
            taken.request,
            route,
            taken.batch,
            scheduler_state=taken.scheduler_state,
            random_states=taken.random_states,
            late_random_states=late_states,
        )

    def late_values(self, request: RolloutRequest, name: str) -> list[RowValue] | None:
        """Return the recorded late values of a replayed step, one per row; None where it was played live."""
        values = self.late.recorded(request, name)
        if values is not None:
            self._settings.ledger.count("answered", "late_values")
            states = self.late.give_back(request, name)
            if states is not None:
                states.restore(self._access.warn)
            return values
        step = self.late.awaited(request)
        if step is not None and step.states_before is None:
            step.states_before = self._real.watch.read()
        return None

    def add_late_values(self, request: RolloutRequest, name: str, values: Sequence[RowValue]) -> Flow[None]:
        """Record values computed from a live batch; the step is written, or compared, once it has them all."""
        if self.late.recorded(request, name) is not None:
            raise SchedulerError(
                f"add_late_values: {request.mode} step {request.global_step} was replayed: its values {name!r} are "
                "recorded, and given by late_values"
            )
        step = self.late.add(request, name, values)
        if step is None:
            return
        late_states = self._real.watch.take_since(step.states_before)
        if step.metrics is not None:
            metrics = step.metrics
            yield Work(lambda: self._submit(step.taken, metrics, late_states))
        elif step.route.is_verified:
            yield Work(lambda: self._compare(step.taken, step.route, late_states))
        self.late.end(step)

    def states_to_restore(self, step: RecordedStep, request: RolloutRequest) -> RecordedStates | None:
        """Return the states to set once the replayed step is answered; None: the generators stay as they are."""
        kind = self._settings.config.random_states
        if kind == "none" or step.info.step != request.global_step:
            return None  # what stands for another step was followed by that step's draws
        is_own = self._settings.is_writer and step.is_as_recorded
        if self.late.names:
            late = RecordedStates.of(
                step.info.late_random_states, where=step.path, is_own=is_own, are_all_needed=kind == "all"
            )
            self.late.restore_after(request, late)
        return RecordedStates.of(step.info.random_states, where=step.path, is_own=is_own, are_all_needed=kind == "all")

    def _ask_for_state(self, taken: Taken) -> Flow[None]:
        if taken.scheduler_state is None:
            yield from self._real.call("state_dict", note=partial(taken.note_state, self._real.owner))
            taken.random_states = self._real.watch.take()

    def _submit(self, taken: Taken, metrics: Mapping[str, float], late_states: GeneratorStates | None = None) -> None:
        if not self._settings.is_writer:
            return
        assert taken.batch is not None
        assert taken.scheduler_state is not None
        self._access.submit(
            taken.batch,
            taken.request,
            metrics=metrics,
            scheduler_state=dict(taken.scheduler_state),
            random_states=taken.random_states,
            late_random_states=late_states,
        )
        taken.is_submitted = True
