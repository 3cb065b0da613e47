"""Reads the steps that will be asked for next, while the training uses the one it has.

Contract: it changes when a step is read, never which one, nor an answer. At most ``_NUM_STEPS`` steps of at most
``_MAX_STEP_BYTES`` are held, each for one call. A step that could not be read ahead is read again by the call that asks
for it, which raises as it would have without: the storage's own client has repeated its requests in both. Steps of a
local folder are not read ahead, since the system does it. No step is looked for behind the end of the plan; without a
plan, steps follow as they did before, and nothing is read ahead behind one that is not there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property

from mock_scheduler.errors import StepNotFoundError
from mock_scheduler.proxy.routing import RequestKey, request_key
from mock_scheduler.recording.reading.reader import ReadStep, RecordingReader
from mock_scheduler.scheduler import RolloutRequest, RowShard
from mock_scheduler.support.threads import PerProcess

#: As many as hide a request that fails, and that the client repeats a second later, behind short updates.
_NUM_STEPS = 4
_NUM_THREADS = 2
#: So all of them take 2 GiB at most; beside them, for a moment, a compressed file that turns out to be larger.
_MAX_STEP_BYTES = 2**29


class _Reading:
    """One process's threads, and what they read; threads end with ``close``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_closed = False
        self.steps: dict[RequestKey, Future[ReadStep | None]] = {}
        self.executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="rollout-reader")


class ReadAhead:
    """Reads ahead for one scheduler.

    Args:
        plan: every request to come, in order; empty: not known.
        source_of: the request that a recorded step is read for in place of a coming one; None: it is played, or is
            recorded by this run itself.
        shard: this process's part of each step.
    """

    def __init__(
        self,
        plan: Sequence[RolloutRequest],
        *,
        source_of: Callable[[RolloutRequest], RolloutRequest | None],
        shard: RowShard | None,
    ) -> None:
        self._plan = plan
        self._source_of = source_of
        self._shard = shard
        self._asked: dict[str, int] = {}
        self._expected: dict[str, RolloutRequest] = {}
        self._absent: dict[str, int] = {}
        self._reading = PerProcess(_Reading(), remake=_Reading)

    def take(self, source: RolloutRequest) -> ReadStep | None:
        """The step of ``source`` if it was read, else None; waits where it is being read."""
        reading = self._reading.get()
        with reading.lock:
            future = reading.steps.pop(request_key(source), None)
        # One that no thread has begun with is read by the caller.
        if future is None or future.cancel() or future.exception() is not None:
            return None
        return future.result()

    def follow(self, request: RolloutRequest, reader: RecordingReader) -> None:
        """Begin to read what will be asked for after ``request``; steps that were read for another future go."""
        reading = self._reading.get()
        with reading.lock:
            sources = map(self._source_of, () if reading.is_closed else self._next(request))
            wanted = {request_key(source): source for source in sources if source is not None}
            for key in reading.steps.keys() - wanted.keys():
                reading.steps.pop(key).cancel()
            for key, source in wanted.items():
                if key not in reading.steps:
                    reading.steps[key] = reading.executor.submit(self._read, reader, source)

    def run(self, function: Callable[[], object]) -> Future[object]:
        """Do other work on these threads, before further steps are read."""
        return self._reading.get().executor.submit(function)

    def close(self) -> None:
        """End the threads, each after what it is reading."""
        if self._reading.is_own:
            reading = self._reading.get()
            with reading.lock:
                reading.is_closed = True
                reading.steps.clear()
            reading.executor.shutdown(cancel_futures=True)

    def _read(self, reader: RecordingReader, source: RolloutRequest) -> ReadStep | None:
        try:
            return reader.read_step(source, shard=self._shard, max_bytes=_MAX_STEP_BYTES)
        except StepNotFoundError:
            folder, step = request_key(source)
            self._absent[folder] = step
            raise

    def _next(self, request: RolloutRequest) -> list[RolloutRequest]:
        """The requests that come after this one, as far as steps are read ahead."""
        if self._plan:
            place = self._places.get(request_key(request), len(self._plan)) + 1
            return list(self._plan[place : place + _NUM_STEPS])
        folder, step = request_key(request)
        distance = max(step - self._asked.get(folder, step - 1), 1)
        self._asked[folder] = step
        # Of each folder the step that comes next, the folder that was asked last at the end.
        self._expected.pop(folder, None)
        if self._absent.get(folder, -1) < step:  # else it is asked about once
            self._expected[folder] = replace(request, global_step=step + distance, prompts=None)
        return list(self._expected.values())[-_NUM_STEPS:]

    @cached_property
    def _places(self) -> dict[RequestKey, int]:
        return {request_key(request): place for place, request in enumerate(self._plan)}
