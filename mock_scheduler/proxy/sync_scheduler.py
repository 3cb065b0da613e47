"""The synchronous front end of the proxy."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from types import TracebackType

from mock_scheduler.errors import RecordingError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.core import ProxyCore
from mock_scheduler.proxy.effects import Build, Call, Effect, Flow, Guarded, LockTable, T, Work, is_raised_already
from mock_scheduler.proxy.loop_thread import LoopThread
from mock_scheduler.scheduler import NativeBatch, RolloutRequest
from mock_scheduler.support.digests import JSON


class ProxyScheduler:
    """A ``RolloutScheduler`` in every mode; ``build_scheduler`` makes it.

    An asynchronous real scheduler runs on one event loop in a thread of its own, until ``close``. As a context manager
    it closes itself. Once it is closed every other call is a ``SchedulerError``.
    """

    def __init__(self, core: ProxyCore) -> None:
        self._core = core
        self._loop_thread = LoopThread()
        self._locks = LockTable(threading.RLock)

    @property
    def ledger(self) -> Ledger:
        """What was built, called, answered, suppressed and recorded so far."""
        return self._core.ledger

    def get_batch(self, request: RolloutRequest) -> NativeBatch:
        """The ``RolloutBatch`` for ``request`` or, with a codec, the framework's own batch.

        A real scheduler's exception passes unchanged. Raises ``BatchError`` and ``SchedulerError`` for a wrong answer,
        ``ContractError`` for one that verification refuses, ``StepNotFoundError`` and ``RecordingError`` as the
        recording does, also for an earlier step that could not be written. What fails after the real scheduler gave its
        batch does not lose it, unless it was a wrong answer: the next call for an equal request gets that batch, and
        one for the same step that asks for anything else is a ``SchedulerError``. So is one for a step that this run
        has recorded already, unless a state was loaded meanwhile.
        """
        return self._run(self._core.get_batch(request))

    def suspend(self) -> None:
        """Stop generating: the weights are about to change."""
        self._run(self._core.suspend())

    def resume(self) -> None:
        """Go on generating."""
        self._run(self._core.resume())

    def update_weights(self, policy_version: int) -> None:
        """The policy now is version ``policy_version``."""
        self._run(self._core.update_weights(policy_version))

    def collect_metrics(self) -> dict[str, float]:
        """Metrics of the last batch; those out of a recording are named ``recorded/…``.

        A real scheduler that returns None has none; raises ``SchedulerError`` where it returns what is no number.
        """
        return self._run(self._core.collect_metrics())

    def state_dict(self) -> dict[str, JSON]:
        """What a checkpoint must keep; all that was recorded so far is then on disk.

        A real scheduler that returns None keeps nothing; raises ``SchedulerError`` where it returns no dict.
        """
        return self._run(self._core.state_dict())

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Go on from a ``state_dict`` of any mode."""
        self._run(self._core.load_state_dict(state))

    def checkpoint_saved(self, next_step: int) -> None:
        """A checkpoint from which step ``next_step`` starts is on disk: what it makes superfluous may be removed.

        Raises ``SchedulerError`` where ``next_step`` is no step, or later than the one after the last training step
        that this scheduler gave, or any scheduler of the run has recorded.
        """
        self._run(self._core.checkpoint_saved(next_step))

    def close(self) -> None:
        """Close the real scheduler, write what is left and raise what could not be written.

        A second call only raises again.
        """
        # Each part is done whatever another one raises. Not an ExitStack: that would drop the error, as the context of
        # what is raised here, with which a ``with`` block is ending already.
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
                    return self._loop_thread.run(result, note=effect.told)
                return effect.told(result)
            case Work(function):
                return function()
            case Guarded(lock, flow):
                with self._locks.of(lock):
                    return self._run(flow)
