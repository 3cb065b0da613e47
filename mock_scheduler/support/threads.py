"""Runs threads: writes beside the training loop, values of one process, and torch's own threads.

A ``JobQueue`` runs jobs one at a time, in the order of their submission, and never loses one or its error.

Contract: its thread ends when nothing is left (so the process can end, and ends only after its last job). At most
``max_held`` submitted jobs are held. No job runs after one that failed, and every later call raises: the first call the
error as it was, the others an error about it. Any thread may call.

Threads, the connections of clients and locks of files do not live on in a forked child, though their objects do.
Whoever holds such an object holds it in a ``PerProcess``, and nothing else need know of forks: the queue of a forked
child is its own, and its parent's jobs are its parent's to do.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from mock_scheduler.errors import MockSchedulerError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueTexts:
    """Holds the words of one queue's errors.

    closed: the whole message of a call after ``close``. halted: begins the message of calls after a failure was raised.
    failed, skipped: begin the log lines of a job that failed, and of a job that is not run for that reason.
    """

    closed: str
    halted: str
    failed: str
    skipped: str


class _Worker:
    """Runs the thread of one process with its locks. ``slots`` bounds the jobs held."""

    def __init__(self, name: str, max_held: int) -> None:
        self.state_lock, self.run_lock = threading.Lock(), threading.Lock()
        self.slots = threading.BoundedSemaphore(max_held)
        # Its thread is joined when the interpreter ends, after the jobs that were queued.
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self.last: Future[None] | None = None


class JobQueue:
    """Queues jobs for one thread.

    Args:
        name: of the thread.
        texts: the words of errors.
        error: raised by calls after ``close``, and after a failure was raised.
        logger: tells at once of a failure, since the next call may be far away or never come.
        max_held: jobs held at most, the running one included.
        is_background: False runs each job at once, in the thread that gives it.
    """

    def __init__(
        self,
        name: str,
        *,
        texts: QueueTexts,
        error: type[MockSchedulerError],
        logger: logging.Logger,
        max_held: int,
        is_background: bool = True,
    ) -> None:
        self._texts = texts
        self._error = error
        self._logger = logger
        self._is_background = is_background
        self._is_closed = False
        self._failure: BaseException | None = None
        self._is_failure_raised = False
        self._worker = PerProcess(_Worker(name, max_held), remake=lambda: _Worker(name, max_held))

    def submit(self, make_job: Callable[[], Callable[[], object]]) -> None:
        """Waits until fewer than ``max_held`` jobs are held, makes one and queues it.

        ``make_job`` is called here, so it copies everything as it is now. Raises the error of an earlier job, and
        the queue's own error where it was raised before or the queue is closed.
        """
        self.check_open()
        worker = self._worker.get()
        worker.slots.acquire()
        try:
            self.check_open()
            cell = [make_job()]
            if self._is_background:
                with worker.state_lock:
                    self._refuse_where_closed()
                    worker.last = worker.executor.submit(self._run_held, cell, worker)
                return
        except BaseException:
            worker.slots.release()
            raise
        self._run_held(cell, worker)
        self._raise_failure()

    def compute(self, function: Callable[[], T]) -> Future[T]:
        """Queues a small computation and gives its future, with its error if it has one; it takes no place of a job."""
        self.check_open()
        return self._worker.get().executor.submit(function)

    def run(self, job: Callable[[], T]) -> T:
        """Does ``job`` here, after the queued ones, and gives its result; raises as ``submit``.

        An error of ``job`` itself is its caller's alone: it ends nothing.
        """
        self.flush()
        self.check_open()
        with self._worker.get().run_lock:
            return job()

    def flush(self) -> None:
        """Returns when every job given is done; raises where one has failed, every time."""
        worker = self._worker.get()
        with worker.state_lock:
            last = worker.last
        if last is not None:
            wait([last])
        self._raise_failure()

    def close(self) -> None:
        """Takes no more jobs and flushes; a second call only raises again. Raises as ``flush``, closed all the same."""
        worker = self._worker.get()
        with worker.state_lock:
            self._is_closed = True
        try:
            self.flush()
        finally:
            worker.executor.shutdown()

    def abandon(self) -> None:
        """Takes no more jobs and drops the queued ones; returns when the running one has ended, whatever it raises."""
        worker = self._worker.get()
        with worker.state_lock:
            self._is_closed = True
        worker.executor.shutdown(cancel_futures=True)

    def check_open(self) -> None:
        """Raises where a job has failed, and the queue's own error where none can be given any more."""
        self._raise_failure()
        self._refuse_where_closed()

    def _refuse_where_closed(self) -> None:
        if self._is_closed:
            raise self._error(self._texts.closed)

    def _raise_failure(self) -> None:
        with self._worker.get().state_lock:
            failure, is_raised = self._failure, self._is_failure_raised
            self._is_failure_raised = failure is not None
        if failure is None:
            return
        # Once raised, an error may have been caught: later calls must raise too, or a checkpoint would claim the write.
        if not is_raised:
            raise failure
        raise self._error(f"{self._texts.halted}: {str(failure) or repr(failure)}") from failure

    def _run_held(self, cell: list[Callable[[], object]], worker: _Worker) -> None:
        """Does the job in ``cell``, and frees its place only when nothing refers to the job any more."""
        try:
            with worker.run_lock:
                self._run(cell, worker)
        finally:
            cell.clear()
            worker.slots.release()

    def _run(self, cell: list[Callable[[], object]], worker: _Worker) -> None:
        if self._failure is not None:
            self._logger.error("%s, since the write before it failed", self._texts.skipped)
            return
        try:
            cell.pop()()
        except BaseException as error:  # noqa: BLE001  # not handled: every later call raises it
            with worker.state_lock:
                self._failure = error
            if self._is_background:
                self._logger.error("%s; the next call raises this error: %s", self._texts.failed, error)


class PerProcess(Generic[T]):
    """A value of this process; ``remake`` makes another one at the first use in a forked child."""

    def __init__(self, value: T, *, remake: Callable[[], T]) -> None:
        self._value = value
        self._remake = remake
        self._process_id = os.getpid()

    def get(self) -> T:
        """Gives this process's own value."""
        if not self.is_own:
            self._value, self._process_id = self._remake(), os.getpid()
        return self._value

    @property
    def is_own(self) -> bool:
        """Whether this process has a value already; false in a forked child that has not used it yet."""
        return self._process_id == os.getpid()


@contextmanager
def without_inner_threads() -> Iterator[None]:
    """Let torch compute each operation on one thread, since blocks are computed on several."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
