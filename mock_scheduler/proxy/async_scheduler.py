"""Has the asynchronous front end of the proxy.

Contract: the event loop never waits for a file or for a synchronous scheduler: both work in threads. A cancelled call
ends only after its thread has finished, so no call leaves half a step behind.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from weakref import WeakKeyDictionary

from mock_scheduler.batch.columns import RowValue
from mock_scheduler.errors import RecordingError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.core import ProxyCore
from mock_scheduler.proxy.effects import (
    Build,
    Call,
    Effect,
    Flow,
    Guarded,
    LockTable,
    T,
    Work,
    is_async,
    is_raised_already,
)
from mock_scheduler.scheduler import NativeBatch, RolloutRequest
from mock_scheduler.support.digests import JSON


class AsyncProxyScheduler:
    """An ``AsyncRolloutScheduler`` in every mode; ``build_async_scheduler`` makes it.

    It has the methods of ``ProxyScheduler``. Calls for different schedulers or kinds may run at the same time; a
    synchronous real scheduler still plays one batch at a time. It may serve one event loop after another. As an async
    context manager it closes itself.
    """

    def __init__(self, core: ProxyCore) -> None:
        self._core = core
        # An asyncio lock belongs for good to the first event loop that waits for it.
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, LockTable[asyncio.Lock]] = WeakKeyDictionary()

    @property
    def ledger(self) -> Ledger:
        """Counts the calls so far: built, called, answered, suppressed and recorded."""
        return self._core.ledger

    async def get_batch(self, request: RolloutRequest) -> NativeBatch:
        """Return the batch, as ``ProxyScheduler.get_batch`` does.

        A cancelled call leaves no half step. Where the real scheduler had given its batch already, the next call with
        an equal request gets it.
        """
        return await self._run(self._core.get_batch(request))

    async def late_values(self, request: RolloutRequest, name: str) -> list[RowValue] | None:
        """Return recorded values of a step just replayed, as ``ProxyScheduler.late_values`` does."""
        return self._core.late_values(request, name)

    async def add_late_values(self, request: RolloutRequest, name: str, values: Sequence[RowValue]) -> None:
        """Record values computed from a batch just played, as ``ProxyScheduler.add_late_values`` does."""
        await self._run(self._core.add_late_values(request, name, values))

    async def suspend(self) -> None:
        """Stop generating: the weights are about to change."""
        await self._run(self._core.suspend())

    async def resume(self) -> None:
        """Go on generating."""
        await self._run(self._core.resume())

    async def update_weights(self, policy_version: int) -> None:
        """Take over the policy of version ``policy_version``."""
        await self._run(self._core.update_weights(policy_version))

    async def collect_metrics(self) -> dict[str, float]:
        """Return the metrics of the last batch; recorded ones are named ``recorded/…``."""
        return await self._run(self._core.collect_metrics())

    async def state_dict(self) -> dict[str, JSON]:
        """Return the state for a checkpoint, once all recorded steps are on disk."""
        return await self._run(self._core.state_dict())

    async def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Go on from a ``state_dict`` of any mode."""
        await self._run(self._core.load_state_dict(state))

    async def checkpoint_saved(self, next_step: int) -> None:
        """Let the writer remove steps made superfluous by a checkpoint on disk, from which ``next_step`` starts."""
        await self._run(self._core.checkpoint_saved(next_step))

    async def close(self) -> None:
        """Close the real scheduler, write the rest, and raise any error of writing.

        A second call only raises again, also where the first one was cancelled.
        """
        try:  # each part is done whatever the other one raises
            await self._run(self._core.close_real())
        finally:
            await self._run(self._core.close_writer())

    async def __aenter__(self) -> AsyncProxyScheduler:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except RecordingError as failure:
            if not is_raised_already(failure, error):
                raise

    async def _run(self, flow: Flow[T]) -> T:
        result: object = None
        with closing(flow):  # where an effect fails, what the flow holds open ends with it
            while True:
                try:
                    effect = flow.send(result)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]  # a generator's return value
                result = await self._perform(effect)

    async def _perform(self, effect: Effect) -> object:
        match effect:
            case Build(make_real):
                # On the event loop, where the scheduler may start tasks. A slow builder can be `async def`.
                return await _settle(make_real())
            case Call(method, arguments):
                if is_async(method):
                    return effect.noted(await _settle(method(*arguments)))
                result = await _in_thread(lambda: method(*arguments), note=effect.noted)
                return effect.noted(await result) if inspect.isawaitable(result) else result
            case Work(function):
                return await _in_thread(function)
            case Guarded(lock, flow):
                locks = self._locks.setdefault(asyncio.get_running_loop(), LockTable(asyncio.Lock))
                async with locks.of(lock):
                    return await self._run(flow)


async def _settle(result: object) -> object:
    return await result if inspect.isawaitable(result) else result


async def _in_thread(function: Callable[[], object], *, note: Callable[[object], object] | None = None) -> object:
    """Call ``function`` in a thread; a cancellation waits for its end, and ``note`` gets its result all the same."""

    def settle() -> tuple[object, BaseException | None]:
        try:
            return function(), None
        except BaseException as error:  # noqa: BLE001  # not handled: it is raised again by the caller
            return None, error

    task = asyncio.ensure_future(asyncio.to_thread(settle))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as interruption:
            cancelled = interruption
    result, error = task.result()
    if error is None and note is not None and not inspect.isawaitable(result):
        note(result)
    if cancelled is not None:
        raise cancelled from error
    if error is not None:
        raise error
    return result
