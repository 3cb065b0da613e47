"""Runs writes one after another beside the training loop, and never loses one or its error.

Contract: jobs run one at a time in the order in which they were given, in one thread that ends when nothing is left (so
the process can end, and ends only after its last job). Of the jobs given at most two are held: one runs, one waits. No
job runs after one that failed, and every later call raises: the first the error as it was, the others a
``RecordingError`` about it. Any thread may call.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from mock_scheduler.errors import RecordingError

logger = logging.getLogger("mock_scheduler.rollout_mock")

MAX_HELD = 2

T = TypeVar("T")


class JobQueue:
    """A queue of jobs for one thread; ``is_background`` False: each runs at once, in the thread that gives it."""

    def __init__(self, *, is_background: bool) -> None:
        self._is_background = is_background
        self._is_closed = False
        self._failure: BaseException | None = None
        self._is_failure_raised = False
        self._last: Future[None] | None = None
        self._start()

    def submit(self, make_job: Callable[[], Callable[[], object]]) -> None:
        """Wait until fewer than ``MAX_HELD`` jobs are held, make one and queue it.

        ``make_job`` is called here, so that what it copies is as it is now. Raises the error of an earlier job, and
        ``RecordingError`` where that was raised before or the queue is closed.
        """
        self.check_open()
        slots = self._slots
        slots.acquire()
        try:
            self.check_open()
            cell = [make_job()]
            if self._is_background:
                with self._state_lock:
                    self._refuse_where_closed()
                    self._last = self._executor.submit(self._run_held, cell, slots)
                return
        except BaseException:
            slots.release()
            raise
        self._run_held(cell, slots)
        self._raise_failure()

    def run(self, job: Callable[[], T]) -> T:
        """Do ``job`` here, after those queued, and give its result; raises as ``submit``.

        What ``job`` itself raises is its caller's alone: it ends nothing.
        """
        self.flush()
        self.check_open()
        with self._run_lock:
            return job()

    def flush(self) -> None:
        """Return when every job that was given is done; raises where one has failed, every time."""
        self._restart_in_child()
        with self._state_lock:
            last = self._last
        if last is not None:
            wait([last])
        self._raise_failure()

    def close(self) -> None:
        """Take no more jobs and flush; a second call only raises again. Raises as ``flush``, closed all the same."""
        self._restart_in_child()
        with self._state_lock:
            self._is_closed = True
        try:
            self.flush()
        finally:
            self._executor.shutdown()

    def check_open(self) -> None:
        """Raise where a job has failed, and ``RecordingError`` where none can be given any more."""
        self._restart_in_child()
        self._raise_failure()
        self._refuse_where_closed()

    def _start(self) -> None:
        self._process_id = os.getpid()
        self._state_lock, self._run_lock = threading.Lock(), threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_HELD)
        # Its thread is joined when the interpreter ends, after the jobs that were queued.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-writer")
        self._last = None

    def _restart_in_child(self) -> None:
        """A forked child has neither the thread nor the jobs, which are its parent's to do."""
        if self._process_id != os.getpid():
            self._start()

    def _refuse_where_closed(self) -> None:
        if self._is_closed:
            raise RecordingError("[Rollout Mock] The writer of this recording is closed: nothing more can be recorded")

    def _raise_failure(self) -> None:
        with self._state_lock:
            failure, is_raised = self._failure, self._is_failure_raised
            self._is_failure_raised = failure is not None
        if failure is None:
            return
        if not is_raised:
            raise failure
        raise RecordingError(
            f"[Rollout Mock] Nothing more is recorded, since an earlier write failed: {str(failure) or repr(failure)}"
        ) from failure

    def _run_held(self, cell: list[Callable[[], object]], slots: threading.BoundedSemaphore) -> None:
        """Do the job in ``cell``, and free its slot only when nothing refers to the job any more."""
        try:
            with self._run_lock:
                self._run(cell)
        finally:
            cell.clear()
            slots.release()

    def _run(self, cell: list[Callable[[], object]]) -> None:
        if self._failure is not None:
            logger.error("[Rollout Mock] A step that was queued is not written, since the write before it failed")
            return
        try:
            cell.pop()()
        except BaseException as error:  # noqa: BLE001  # not handled: every later call raises it
            with self._state_lock:
                self._failure = error
            if self._is_background:
                logger.error("[Rollout Mock] Recording failed; the next call raises this error: %s", error)
