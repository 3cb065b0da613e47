"""Writes each call of the pipeline once, as a flow of effects: the proxy itself, without its front end.

Contract: pure bookkeeping between effects; it never calls, reads or writes by itself. Its state changes only after an
effect succeeded, so a failed or cancelled call leaves no half step, and the next one can go on: a batch of the real
scheduler is kept until the pipeline has it. After ``close`` every call is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.columns import RowValue
from mock_scheduler.errors import BatchError, SchedulerError
from mock_scheduler.proxy.access import RecordingAccess
from mock_scheduler.proxy.checks import (
    Answer,
    as_rollout_batch,
    check_request,
    judge_batch,
    read_metrics,
    read_state,
    version_fall,
)
from mock_scheduler.proxy.effects import Flow, Guarded, Work, is_async
from mock_scheduler.proxy.random_states import GeneratorWatch
from mock_scheduler.proxy.real_scheduler import RealScheduler, Taken, TakenBatches
from mock_scheduler.proxy.routing import Outlook, RequestKey, Route, request_key
from mock_scheduler.proxy.run_state import ProxyState
from mock_scheduler.proxy.settings import ProxySettings
from mock_scheduler.proxy.step_recorder import StepRecorder
from mock_scheduler.recording.paths import step_folder
from mock_scheduler.scheduler import (
    NativeBatch,
    RolloutRequest,
    whole_number,
)
from mock_scheduler.support.digests import JSON

RECORDED_PREFIX = "recorded/"


class ProxyCore:
    """One real scheduler, or none, and one recording, or none; see ``build_scheduler``."""

    def __init__(self, settings: ProxySettings, access: RecordingAccess, *, is_async: bool = False) -> None:
        self._settings = settings
        self._access = access
        self._router = access.router
        self.ledger = settings.ledger
        self._run_state = ProxyState(settings.config.effective_mode)
        modes = settings.config.modes_in_use
        watch = GeneratorWatch(
            settings.config.random_states, is_async=is_async, is_watching=bool(modes & {"dump", "cache", "verify"})
        )
        self._real = RealScheduler(settings.make_real, settings.ledger, watch)
        self._recorder = StepRecorder(settings, access, self._real)
        self._is_state_recorded = True
        self._last: Answer | None = None
        self._taken = TakenBatches()
        self._recorded: set[RequestKey] = set()
        self._is_heir = settings.is_restarted
        self._is_closed = False

    def get_batch(self, request: RolloutRequest) -> Flow[NativeBatch]:
        """Answer ``request``."""
        self._refuse_where_closed("get_batch")
        check_request(request, "get_batch: request")
        # A second call for the step, made while the first is at work, waits for its end.
        native: NativeBatch = yield Guarded(request_key(request), self._answer(request))
        return native

    def _take_over(self, request: RolloutRequest | None) -> Flow[None]:
        """Goes on, once, from the last step of the process before, in one that was started again."""
        if not self._is_heir:  # another call has meanwhile
            return
        last = yield Work(lambda: self._access.last_trained(request))
        self._is_heir = False
        if last is not None:
            self._run_state.take_over(step_folder("train", last.scheduler_id), last.step, last.policy_version)
            self._real.state, self._is_state_recorded = last.scheduler_state, False
            self._access.warn(f"The real scheduler goes on from the state recorded with train step {last.step}")

    def _answer(self, request: RolloutRequest) -> Flow[NativeBatch]:
        route = self._router.route(request)
        if route.is_recorded and request_key(request) in self._recorded:
            raise SchedulerError(
                f"{request.mode} step {request.global_step} was already recorded by this run: get_batch was called "
                "twice for it"
            )
        what = f"{request.mode} step {request.global_step}"
        earlier = self._run_state.earlier_request(request)
        self._judge_version(what, request.policy_version, earlier, is_live=route.is_live)
        self._recorder.late.refuse_waiting("get_batch", request)
        answer: Answer
        answer = yield from self._play(request, route) if route.is_live else self._replay(request, route)
        if answer.random_states is not None:
            answer.random_states.restore(self._access.warn)
        # From here on nothing can fail: the step is answered as a whole.
        self._real.watch.reset()
        self._taken.drop(request)
        self._run_state.advance(request, answer.mode)
        self._last = replace(answer, native=None)  # the batch itself is the pipeline's alone
        if route.is_recorded:
            self._recorded.add(request_key(request))
        self._router.advance(request)
        if route.mode == "cache":
            self.ledger.count("recording", "cache_misses" if route.is_live else "cache_hits")
        return answer.native

    def late_values(self, request: RolloutRequest, name: str) -> list[RowValue] | None:
        """Return the recorded late values of a replayed step, one per row; None where it was played live."""
        self._refuse_where_closed("late_values")
        return self._recorder.late_values(request, name)

    def add_late_values(self, request: RolloutRequest, name: str, values: Sequence[RowValue]) -> Flow[None]:
        """Record values computed from a live batch; the step is written, or compared, once it has them all."""
        self._refuse_where_closed("add_late_values")
        yield from self._recorder.add_late_values(request, name, values)

    def suspend(self) -> Flow[None]:
        """Reach a generating real scheduler at once: it must not go on while the weights change."""
        self._refuse_where_closed("suspend")
        # Not held, even where the next answer is unknown: generating on would use weights that are being changed.
        if self._real.calls.is_running:
            yield from self._real.call("suspend")
            self._real.calls.is_running = False
        else:
            yield from self._hold_or_pass("suspend")

    def resume(self) -> Flow[None]:
        """Pass the call on, hold it or suppress it."""
        self._refuse_where_closed("resume")
        yield from self._hold_or_pass("resume")

    def update_weights(self, policy_version: int) -> Flow[None]:
        """Pass the call on, hold it or suppress it; the version counts at once."""
        self._refuse_where_closed("update_weights")
        version = whole_number(policy_version, "update_weights: policy_version")
        is_live = self._router.outlook is not Outlook.REPLAYED
        self._judge_version("update_weights", version, self._run_state.earlier_update, is_live=is_live)
        yield from self._hold_or_pass("update_weights", version)
        self._run_state.updated(version)

    def collect_metrics(self) -> Flow[dict[str, float]]:
        """Return the metrics of the last batch; empty before the first one.

        A replayed batch has its recorded metrics, under ``recorded/``; a batch just recorded has its own as they were
        then; for any other the real scheduler is asked now.
        """
        self._refuse_where_closed("collect_metrics")
        if self._last is None:
            return {}
        if self._last.metrics is None:
            measured = yield from self._real.call("collect_metrics")
            return read_metrics(measured, self._real.owner, self._last.request)
        if self._last.is_replayed:
            self.ledger.count("answered", "collect_metrics")
        return dict(self._last.metrics)

    def state_dict(self) -> Flow[dict[str, JSON]]:
        """Return the state, once all recorded steps are on disk: a checkpoint never claims more."""
        self._refuse_where_closed("state_dict")
        self._recorder.late.refuse_waiting("state_dict")
        if self._access.writer is not None:
            # A checkpoint must not continue after a step that is not on the disk.
            yield Work(self._access.writer.flush)
        if self._is_heir:
            yield Guarded("prepare", self._take_over(None))
        if self._real.state is None and (self._real.is_built or self._router.outlook is Outlook.LIVE):
            if not self._real.is_built:
                yield from self._real.prepare(None)
            state = yield from self._real.call("state_dict")
            last = None if self._last is None else self._last.request
            return self._run_state.as_state(read_state(state, self._real.owner, last))
        self.ledger.count("answered", "state_dict")
        return self._run_state.as_state(self._real.state or {})

    def load_state_dict(self, state: Mapping[str, JSON]) -> Flow[None]:
        """Go on from a state of any mode; the real scheduler has its part before its next answer."""
        self._refuse_where_closed("load_state_dict")
        scheduler_state = self._run_state.load(state)
        self._is_heir = False
        self._taken.clear()
        self._recorder.late.clear()
        self._recorded.clear()  # the writer compares steps that are played again
        if self._router.outlook is Outlook.LIVE and not scheduler_state:
            return  # a real scheduler without state, or a run without one, leaves nothing to load
        self._real.state, self._is_state_recorded = dict(scheduler_state), False
        if self._router.outlook is Outlook.LIVE:
            yield from self._real.prepare(None)
        else:
            self.ledger.count("answered", "load_state_dict")

    def checkpoint_saved(self, next_step: int) -> Flow[None]:
        """Let the writer's retention remove steps made superfluous by the checkpoint."""
        self._refuse_where_closed("checkpoint_saved")
        step = whole_number(next_step, "checkpoint_saved: next_step")
        last_played = self._run_state.last_train_step
        yield Work(lambda: self._access.checkpoint_saved(step, last_played=last_played))

    def close_real(self) -> Flow[None]:
        """Close the real scheduler if it was ever built; held calls are suppressed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._taken.clear()
        waiting = self._recorder.late.problem()
        if waiting is not None:  # not an error: a run that ends by one has one already
            self._access.warn(f"close: {waiting}: it is not recorded")
        self._real.suppress_held()
        if not self._real.is_built:
            self.ledger.count("suppressed", "close")
        else:
            yield from self._real.call("close")

    def close_writer(self) -> Flow[None]:
        """Write the rest and end the threads; raises any error of writing, every time."""
        yield Work(self._access.close)

    def _refuse_where_closed(self, name: str) -> None:
        if self._is_closed:
            raise SchedulerError(f"{name}: the rollout scheduler was closed")

    def _replay(self, request: RolloutRequest, route: Route) -> Flow[Answer]:
        answer: Answer
        answer, scheduler_state = yield Work(lambda: self._load(request, route))
        self.ledger.count("answered", "get_batch")
        self._real.suppress_held()
        # A validation replayed within live training leaves the data where training has them.
        if request.mode == "train" or self._is_state_recorded:
            self._real.state, self._is_state_recorded = scheduler_state, True
        return answer

    def _load(self, request: RolloutRequest, route: Route) -> tuple[Answer, Mapping[str, JSON]]:
        step = self._access.load(request, route)
        batch = self._recorder.late.take_out(step.batch, request, step.path)
        self._check(batch, request, is_replayed=True)
        codec = self._settings.codec
        native = batch if codec is None else codec.decode(batch)
        self._access.log_loaded(request, step)
        metrics = {f"{RECORDED_PREFIX}{name}": value for name, value in step.info.metrics.items()}
        answer = Answer(
            request=request,
            native=native,
            mode="mock",
            metrics=metrics,
            is_replayed=True,
            random_states=self._recorder.states_to_restore(step, request),
        )
        return answer, step.info.scheduler_state

    def _play(self, request: RolloutRequest, route: Route) -> Flow[Answer]:
        if self._settings.is_restarted and not self._real.is_built:
            yield Guarded("prepare", self._take_over(request))
            self._real.calls.missed(request.policy_version)
        if self._taken.find(request) is None:
            yield from self._real.prepare("get_batch")
        flow = self._play_prepared(request, route)
        # A synchronous scheduler is asked by one caller at a time, so that its metrics are those of its batch.
        is_guarded = not is_async(self._real.method("get_batch"))
        answer: Answer = (yield Guarded("play", flow)) if is_guarded else (yield from flow)
        return answer

    def _play_prepared(self, request: RolloutRequest, route: Route) -> Flow[Answer]:
        taken = self._taken.find(request)
        if taken is None:
            yield from self._real.call("get_batch", request, note=partial(self._take, request))
            taken = self._taken.find(request)
        assert taken is not None  # no other call for this step runs beside this one
        # Encoded only where it is recorded or compared.
        if self._settings.codec is not None and not (route.is_recorded or route.is_verified):
            return Answer(request=request, native=taken.native, mode="real")
        yield Work(lambda: self._examine(taken))
        if route.is_recorded:
            metrics = yield from self._recorder.record(taken, route)
            return Answer(request=request, native=taken.native, mode="dump", metrics=metrics)
        if route.is_verified:
            yield from self._recorder.verify(taken, route)
        return Answer(request=request, native=taken.native, mode="verify" if route.is_verified else "real")

    def _take(self, request: RolloutRequest, native: NativeBatch) -> None:
        """Keep a batch of the real scheduler: from now on it is not lost."""
        self._taken.add(request, native)
        self._real.calls.is_running, self._is_state_recorded = True, False

    def _examine(self, taken: Taken) -> None:
        """Check that the live answer is the batch asked for; a wrong one is not kept."""
        if taken.batch is not None:
            return
        codec, request = self._settings.codec, taken.request
        try:
            encoded = taken.native if codec is None else codec.encode(taken.native, request)
            batch = as_rollout_batch(encoded, request)
            self._check(batch, request)
        except (BatchError, SchedulerError):
            self._taken.drop(request)
            raise
        taken.batch = batch

    def _check(self, batch: RolloutBatch, request: RolloutRequest, *, is_replayed: bool = False) -> None:
        settings = self._settings
        reports = judge_batch(
            batch,
            request,
            config=settings.config,
            shard=settings.shard,
            is_reporting=settings.is_logging,
            latest_version=self._run_state.policy_version,
            codec=settings.codec,
            is_replayed=is_replayed,
        )
        self._access.report(request, reports)

    def _judge_version(self, what: str, version: int, earlier: tuple[str, int] | None, *, is_live: bool) -> None:
        line = version_fall(what, version, earlier, self._settings.config, is_live=is_live)
        if line is not None:
            self._access.warn(line)

    def _hold_or_pass(self, name: str, *arguments: object) -> Flow[None]:
        """Pass a call on where answers are live, suppress it where they are replayed, else hold it.

        Where live answers follow replayed ones, nothing is built before the first live one is asked for.
        """
        is_replaying = self._last is not None and self._last.is_replayed
        if self._router.outlook is not Outlook.LIVE or is_replaying:
            self._real.calls.hold(name, arguments)
            if self._router.outlook is Outlook.REPLAYED:
                self._real.suppress_held()
            return
        yield from self._real.prepare(name)
        yield from self._real.call(name, *arguments)
        if name in ("suspend", "resume"):
            self._real.calls.is_running = name == "resume"
