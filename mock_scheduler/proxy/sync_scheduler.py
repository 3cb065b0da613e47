"""Has the synchronous front end of the proxy."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from types import TracebackType

from anyio.from_thread import BlockingPortal, start_blocking_portal

from mock_scheduler.batch.columns import RowValue
from mock_scheduler.errors import RecordingError, SchedulerError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.core import ProxyCore
from mock_scheduler.proxy.effects import Build, Call, Effect, Flow, Guarded, LockTable, T, Work, is_raised_already
from mock_scheduler.scheduler import NativeBatch, RolloutRequest
from mock_scheduler.support.digests import JSON


class ProxyScheduler:
    """A ``RolloutScheduler`` in every mode; ``build_scheduler`` makes it.

    An asynchronous real scheduler runs on one event loop in a thread of its own, until ``close``. As a context manager
    it closes itself. Once it is closed every other call is a ``SchedulerError``.
    """

    def __init__(self, core: ProxyCore) -> None:
        self._core = core
        self._loop_thread = _LoopThread()
        self._locks = LockTable(threading.RLock)

    @property
    def ledger(self) -> Ledger:
        """Counts the calls so far: built, called, answered, suppressed and recorded."""
        return self._core.ledger

    def get_batch(self, request: RolloutRequest) -> NativeBatch:
        """Return the ``RolloutBatch`` for ``request`` or, with a codec, the framework's own batch.

        A failure after the real scheduler gave its batch does not lose it, unless the batch was a wrong answer: the
        next call with an equal request gets it, and a call for the same step with another request is refused.

        Raises:
            SchedulerError: the answer is no batch; the step was asked for otherwise before; or this run has recorded
                the step already, and no state was loaded meanwhile.
            BatchError: the answer is another batch than the one asked for.
            ContractError: verification refuses the batch.
            StepNotFoundError, RecordingError: as the recording raises them, also for an earlier step whose writing
                failed. A real scheduler's own exception passes unchanged.
        """
        return self._run(self._core.get_batch(request))

    def late_values(self, request: RolloutRequest, name: str) -> list[RowValue] | None:
        """Return the recorded values ``name`` of a step just replayed, one per row of its batch, in identity order.

        None where the step was played live: compute them, and give them to ``add_late_values``. Raises
        ``SchedulerError`` where ``build_scheduler(late_values=...)`` does not name them.
        """
        return self._core.late_values(request, name)

    def add_late_values(self, request: RolloutRequest, name: str, values: Sequence[RowValue]) -> None:
        """Record values computed from the batch of a step just played, one per row, in identity order.

        The step is written, or in mode verify compared, once all values named in ``build_scheduler(late_values=...)``
        have come, and before the next step of its kind is asked for. Nothing is done where the step is not recorded.
        Raises ``SchedulerError`` where they came before or the step was replayed, ``BatchError`` where they do not fit
        the batch, and as ``get_batch`` where writing or comparing fails.
        """
        self._run(self._core.add_late_values(request, name, values))

    def suspend(self) -> None:
        """Stop generating: the weights are about to change."""
        self._run(self._core.suspend())

    def resume(self) -> None:
        """Go on generating."""
        self._run(self._core.resume())

    def update_weights(self, policy_version: int) -> None:
        """Take over the policy of version ``policy_version``."""
        self._run(self._core.update_weights(policy_version))

    def collect_metrics(self) -> dict[str, float]:
        """Return the metrics of the last batch; recorded ones are named ``recorded/…``.

        None from a real scheduler counts as no metrics; raises ``SchedulerError`` where a value is no number.
        """
        return self._run(self._core.collect_metrics())

    def state_dict(self) -> dict[str, JSON]:
        """Return the state for a checkpoint, once all recorded steps are on disk.

        None from a real scheduler counts as no state; raises ``SchedulerError`` where it returns no dict.
        """
        return self._run(self._core.state_dict())

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Go on from a ``state_dict`` of any mode."""
        self._run(self._core.load_state_dict(state))

    def checkpoint_saved(self, next_step: int) -> None:
        """Let the writer remove steps made superfluous by a checkpoint on disk, from which ``next_step`` starts.

        Raises ``SchedulerError`` where ``next_step`` is no step, or more than one after the last training step given
        by this scheduler or recorded by any scheduler of the run.
        """
        self._run(self._core.checkpoint_saved(next_step))

    def close(self) -> None:
        """Close the real scheduler, write the rest, and raise any error of writing.

        A second call only raises again.
        """
        # Each part is done whatever another one raises. Not an ExitStack: it would drop the error with which a ``with``
        # block is ending already, which is the context of an error raised here.
        try:
            self._run(self._core.close_real())
        finally:
            try:
                self._run(self._core.close_writer())
            finally:
                self._loop_thread.close()

    def __enter__(self) -> ProxyScheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RecordingError as failure:
            if not is_raised_already(failure, error):
                raise

    def _run(self, flow: Flow[T]) -> T:
        result: object = None
        with closing(flow):  # where an effect fails, what the flow holds open ends with it
            while True:
                try:
                    effect = flow.send(result)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]  # a generator's return value
                result = self._perform(effect)

    def _perform(self, effect: Effect) -> object:
        match effect:
            case Build(make_real):
                real = make_real()
                return self._loop_thread.run(real) if inspect.isawaitable(real) else real
            case Call(method, arguments):
                result = method(*arguments)
                if inspect.isawaitable(result):
                    return self._loop_thread.run(result, note=effect.noted)
                return effect.noted(result)
            case Work(function):
                return function()
            case Guarded(lock, flow):
                with self._locks.of(lock):
                    return self._run(flow)


class _LoopThread:
    """An event loop in a thread of its own, for an asynchronous scheduler behind a synchronous pipeline.

    Contract: it starts with the first awaitable and lives until ``close``, or until its owner is gone, so tasks of the
    scheduler go on between two calls. A forked child has no such thread, and is told so.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process_id = os.getpid()
        self._end: weakref.finalize[..., _LoopThread] | None = None

    def run(self, awaitable: Awaitable[object], *, note: Callable[[object], object] = lambda _result: None) -> object:
        """Return the result of ``awaitable``, or raise its very exception; an interrupt of this thread cancels it.

        Several threads may call at once. ``note`` gets the result as soon as it exists, also after an interrupt.
        Raises ``SchedulerError`` in a process forked from the one with the loop.
        """

        async def settle() -> tuple[object, BaseException | None]:
            try:
                result = await awaitable
                note(result)
                return result, None
            except BaseException as error:  # noqa: BLE001  # not handled: it is raised again in the calling thread
                return None, error

        if self._loop is not None and self._process_id != os.getpid():
            if asyncio.iscoroutine(awaitable):
                awaitable.close()
            raise SchedulerError(
                f"the rollout scheduler runs on an event loop of process {self._process_id}, from which this process "
                f"{os.getpid()} was forked: it cannot be used here. Build it after forking, in each process that uses "
                "it."
            )
        # A task of asyncio's own is cancelled once; the portal's would be cancelled again at each await of its cleanup.
        future = asyncio.run_coroutine_threadsafe(settle(), self._running_loop())
        try:
            result, error = future.result()
        except BaseException:
            future.cancel()
            raise
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Cancel all tasks on the loop, wait for them and end the thread; a second call does nothing."""
        if self._end is not None:
            self._end()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                stack = ExitStack()
                portal = stack.enter_context(start_blocking_portal(name="rollout-scheduler"))
                self._loop, self._process_id = portal.call(asyncio.get_running_loop), os.getpid()
                self._end = weakref.finalize(self, _end_portal, stack, portal, self._loop, process_id=os.getpid())
            return self._loop


def _end_portal(stack: ExitStack, portal: BlockingPortal, loop: asyncio.AbstractEventLoop, *, process_id: int) -> None:
    if process_id != os.getpid():  # a forked child, whose parent has the loop
        return
    try:
        is_inside = asyncio.get_running_loop() is loop
    except RuntimeError:  # the usual case: no loop runs in this thread
        is_inside = False
    if is_inside:  # collected by the loop's own thread, which cannot wait for itself
        asyncio.run_coroutine_threadsafe(portal.stop(), loop)
    else:
        stack.close()
