"""One event loop in a thread of its own, for an asynchronous scheduler behind a synchronous loop.

Contract: it starts with the first coroutine and lives until ``close``, so that what the scheduler started on it goes on
between two calls. It does not live on in a forked child, which is told so.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable

from mock_scheduler.errors import SchedulerError


class LoopThread:
    """Runs awaitables one after the other, or at once where several threads ask; ends with its owner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process_id = os.getpid()
        self._stop: weakref.finalize[..., LoopThread] | None = None

    def run(self, awaitable: Awaitable[object], *, note: Callable[[object], object] = lambda _result: None) -> object:
        """The result of ``awaitable``; what it raises is raised here, the very object. An interrupt cancels it.

        ``note`` is told of the result where it comes, also after an interrupt. Raises ``SchedulerError`` in a process
        that was forked from the one in which the loop runs.
        """

        async def settle() -> tuple[object, BaseException | None]:
            try:
                result = await awaitable
                note(result)
                return result, None
            except BaseException as error:  # noqa: BLE001  # not handled: it is raised again in the calling thread
                return None, error

        if self._is_of_parent():
            if asyncio.iscoroutine(awaitable):
                awaitable.close()
            raise SchedulerError(
                f"the rollout scheduler runs on an event loop of process {self._process_id}, from which this process "
                f"{os.getpid()} was forked: it cannot be used here. Build it after forking, in each process that uses "
                "it."
            )
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
        """Cancel what still runs on the loop and end the thread; a second call does nothing."""
        if self._stop is not None:
            self._stop()

    def _is_of_parent(self) -> bool:
        return self._loop is not None and self._process_id != os.getpid()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop, self._process_id = asyncio.new_event_loop(), os.getpid()
                thread = threading.Thread(target=_run_loop, args=(self._loop,), name="rollout-scheduler", daemon=True)
                thread.start()
                self._stop = weakref.finalize(self, _stop_loop, self._loop, thread, os.getpid())
            return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, process_id: int) -> None:
    if process_id != os.getpid():  # a forked child, whose parent's loop this is
        return
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join()
