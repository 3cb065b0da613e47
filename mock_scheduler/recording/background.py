"""Runs writes one after another beside the training loop, and never loses one or its error.

Contract: jobs run in the order in which they were given, in one thread that ends when nothing is left (so the process
can end, and ends only after its last job). Of the jobs given at most two are held: one runs, one waits. The error of a
job is raised once, as it was, by the next call; no job runs after it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mock_scheduler.errors import RecordingError

logger = logging.getLogger("mock_scheduler.rollout_mock")

MAX_HELD = 2


class JobQueue:
    """A queue of jobs for one thread; ``is_background`` False: each runs at once, in the thread that gives it."""

    def __init__(self, *, is_background: bool) -> None:
        self._is_background = is_background
        self._is_closed = False
        self._first_error: str | None = None
        self._start()

    def submit(self, make_job: Callable[[], Callable[[], object]]) -> None:
        """Wait until fewer than ``MAX_HELD`` jobs are held, make one and queue it.

        ``make_job`` is called here, so that what it copies is as it is now. Raises the error of an earlier job, and
        ``RecordingError`` where an earlier job failed or the queue is closed.
        """
        self.check_open()
        slots = self._slots
        slots.acquire()
        try:
            self.check_open()
            cell = [make_job()]
            if self._is_background:
                self._futures.append(self._executor.submit(self._run, cell, slots))
                return
        except BaseException:
            slots.release()
            raise
        try:
            self._run(cell, slots)
        except BaseException as error:
            self._first_error = str(error)
            raise

    def flush(self) -> None:
        """Return when every job is done; raises the error of one that failed, unless it was raised before."""
        self._restart_in_child()
        while self._futures:
            self._wait_for_first()

    def close(self) -> None:
        """Flush and take no more jobs; a second call does nothing. Raises as ``flush``, closed all the same."""
        try:
            self.flush()
        finally:
            self._is_closed = True
            self._executor.shutdown()

    def check_open(self) -> None:
        """Raise the error of a job that failed, and ``RecordingError`` where none can be given any more."""
        self._restart_in_child()
        while self._futures and (self._futures[0].done() or self._has_failed.is_set()):
            self._wait_for_first()
        if self._first_error is not None:
            raise RecordingError(
                f"[Rollout Mock] Nothing more is recorded, since an earlier write failed: {self._first_error}"
            )
        if self._is_closed:
            raise RecordingError("[Rollout Mock] The writer of this recording is closed: nothing more can be recorded")

    def _start(self) -> None:
        self._process_id = os.getpid()
        self._has_failed = threading.Event()
        self._slots = threading.BoundedSemaphore(MAX_HELD)
        # Its thread is joined when the interpreter ends, after the jobs that were queued.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-writer")
        self._futures: list[Future[None]] = []

    def _restart_in_child(self) -> None:
        """A forked child has neither the thread nor the jobs, which are its parent's to do."""
        if self._process_id != os.getpid():
            self._start()

    def _wait_for_first(self) -> None:
        error = self._futures.pop(0).exception()
        if error is not None:
            self._futures.clear()  # what was queued after it is not done
            self._first_error = str(error)
            raise error

    def _run(self, cell: list[Callable[[], object]], slots: threading.BoundedSemaphore) -> None:
        """Do the job in ``cell``, and free its slot only when nothing refers to the job any more."""
        try:
            if self._has_failed.is_set():
                logger.error("[Rollout Mock] A step that was queued is not written, since the write before it failed")
                return
            cell.pop()()
        except BaseException as error:
            self._has_failed.set()
            if self._is_background:
                logger.error("[Rollout Mock] Recording failed; the next call raises this error: %s", error)
            raise
        finally:
            cell.clear()
            slots.release()
