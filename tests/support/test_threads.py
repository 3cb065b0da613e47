"""The queue beside the training loop: order, memory, errors, the end of the process and forks."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from mock_scheduler.errors import RecordingError
from mock_scheduler.support.threads import JobQueue, PerProcess, QueueTexts, without_inner_threads
from tests.recording.processes import run_in_child

# Python 3.12 warns of a fork beside threads, of which torch and earlier tests may have left some: ours need none.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


MAX_HELD = 2

TEXTS = QueueTexts(
    closed="the writer is closed",
    halted="nothing more is written",
    failed="a write failed",
    skipped="a write is left out",
)


def open_queue(*, is_background: bool) -> JobQueue:
    """A queue as a recording has it."""
    return JobQueue(
        "rollout-writer",
        texts=TEXTS,
        error=RecordingError,
        logger=logging.getLogger("mock_scheduler.test"),
        max_held=MAX_HELD,
        is_background=is_background,
    )


class Gate:
    """Holds the writing thread until the test opens it, and tells that a job has begun."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def job(self) -> None:
        self.has_begun.set()
        assert self.may_end.wait(60)


def giving(job: Callable[[], object]) -> Callable[[], Callable[[], object]]:
    return lambda: job


def fail() -> None:
    raise ZeroDivisionError("the first error")


@pytest.mark.parametrize("is_background", [True, False])
def test_jobs_run_in_the_order_in_which_they_were_given(is_background: bool) -> None:
    queue, done = open_queue(is_background=is_background), []
    for number in range(20):
        queue.submit(giving(lambda number=number: done.append(number)))
    queue.flush()
    assert done == list(range(20))
    queue.close()


def test_giving_a_job_does_not_wait_for_it() -> None:
    queue, gate, done = open_queue(is_background=True), Gate(), []
    queue.submit(giving(gate.job))
    queue.submit(giving(lambda: done.append(1)))
    assert (gate.has_begun.wait(60), done) == (True, [])
    gate.may_end.set()
    queue.close()
    assert done == [1]


def test_a_job_in_place_is_done_when_it_was_given() -> None:
    queue, threads = open_queue(is_background=False), []
    queue.submit(giving(lambda: threads.append(threading.current_thread())))
    assert threads == [threading.current_thread()]


class Payload:
    """Stands for a batch: counted while anything refers to it."""

    def __init__(self, alive: weakref.WeakSet[Payload]) -> None:
        alive.add(self)


def test_never_more_than_two_jobs_are_held() -> None:
    """Each job holds a payload; at the moment in which one more is made, at most one other may be alive."""
    alive: weakref.WeakSet[Payload] = weakref.WeakSet()
    most: list[int] = []

    def make_job() -> Callable[[], object]:
        payload = Payload(alive)
        most.append(len(alive))
        return lambda: (most.append(len(alive)), payload)

    queue = open_queue(is_background=True)
    for _ in range(300):
        queue.submit(make_job)
    queue.close()
    gc.collect(1)
    assert (max(most), len(most), len(alive)) == (MAX_HELD, 600, 0)


def test_a_third_job_is_not_made_before_the_first_is_done() -> None:
    queue, gate, made = open_queue(is_background=True), Gate(), threading.Event()
    queue.submit(giving(gate.job))
    queue.submit(giving(lambda: None))

    def make_third() -> Callable[[], object]:
        made.set()
        assert gate.may_end.is_set()
        return lambda: None

    giver = threading.Thread(target=lambda: queue.submit(make_third))
    giver.start()
    assert gate.has_begun.wait(60)
    assert not made.is_set()
    gate.may_end.set()
    giver.join(60)
    assert made.is_set()
    queue.close()


REPEATED = "nothing more is written: the first error"


@pytest.mark.parametrize("is_background", [True, False])
@pytest.mark.parametrize("call", ["submit", "run", "flush", "close", "check_open"])
def test_an_error_is_raised_as_it_was_by_the_next_call_and_told_of_by_all_later_ones(
    call: str, is_background: bool
) -> None:
    """It was forgotten once raised: a later flush said that all was on disk, and close that all was well."""
    queue, done = open_queue(is_background=is_background), []
    calls: dict[str, Callable[[], object]] = {
        "submit": lambda: queue.submit(giving(lambda: done.append(1))),
        "run": lambda: queue.run(lambda: done.append(1)),
        "flush": queue.flush,
        "check_open": queue.check_open,
        "close": queue.close,
    }
    with contextlib.suppress(ZeroDivisionError):
        queue.submit(giving(fail))
    if is_background:
        queue._worker.get().executor.submit(int).result()  # the thread has got past the failed job
        with pytest.raises(ZeroDivisionError, match="the first error"):
            calls[call]()
    for _ in range(2):
        for later in calls.values():
            with pytest.raises(RecordingError) as caught:
                later()
            assert str(caught.value) == REPEATED
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert done == []


def test_what_a_job_raises_that_is_run_here_is_its_callers_alone() -> None:
    queue = open_queue(is_background=True)
    with pytest.raises(ZeroDivisionError):
        queue.run(fail)
    assert queue.run(lambda: 3) == 3
    queue.close()


def test_any_thread_may_give_jobs() -> None:
    """Two threads that looked at the first job together took two away: IndexError, or an error that was lost."""
    queue, failures, done = open_queue(is_background=True), [], []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def give_many() -> None:
        try:
            for _ in range(100):
                queue.submit(giving(lambda: done.append(1)))
            queue.flush()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=give_many) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    queue.close()
    assert (failures, len(done)) == ([], 400)


def test_jobs_in_place_run_one_at_a_time() -> None:
    queue, running, most = open_queue(is_background=False), [], []
    barrier = threading.Barrier(3)

    def job() -> None:
        running.append(1)
        most.append(len(running))
        running.pop()

    def give_many() -> None:
        barrier.wait(60)
        for _ in range(50):
            queue.submit(giving(job))

    threads = [threading.Thread(target=give_many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] * 150


def test_what_waited_behind_a_failed_job_is_not_done(caplog: pytest.LogCaptureFixture) -> None:
    queue, gate, done = open_queue(is_background=True), Gate(), []

    def fail_late() -> None:
        gate.job()
        fail()

    queue.submit(giving(fail_late))
    queue.submit(giving(lambda: done.append(1)))
    gate.may_end.set()
    with pytest.raises(ZeroDivisionError):
        queue.flush()
    with pytest.raises(RecordingError):
        queue.close()
    assert done == []
    assert [record.getMessage() for record in caplog.records] == [
        "a write failed; the next call raises this error: the first error",
        "a write is left out, since the write before it failed",
    ]


def test_a_call_that_waited_for_a_failing_job_raises_its_error_and_makes_nothing() -> None:
    queue, gate, made = open_queue(is_background=True), Gate(), []

    def fail_late() -> None:
        gate.job()
        fail()

    queue.submit(giving(fail_late))
    queue.submit(giving(lambda: None))
    caught: list[BaseException] = []

    def give_third() -> None:
        try:
            queue.submit(lambda: made.append(1) or (lambda: None))
        except ZeroDivisionError as error:
            caught.append(error)

    giver = threading.Thread(target=give_third)
    giver.start()
    gate.may_end.set()
    giver.join(60)
    assert ([str(error) for error in caught], made) == (["the first error"], [])
    with pytest.raises(RecordingError):
        queue.close()


def test_a_job_that_fails_in_place_raises_at_once_and_ends_the_queue() -> None:
    queue = open_queue(is_background=False)
    with pytest.raises(ZeroDivisionError, match="the first error"):
        queue.submit(giving(fail))
    for _ in range(2):
        with pytest.raises(RecordingError, match=r"^nothing more is written: the first error$"):
            queue.submit(giving(fail))


@pytest.mark.parametrize("is_background", [True, False])
def test_a_job_that_cannot_be_made_takes_no_place(is_background: bool) -> None:
    queue, done = open_queue(is_background=is_background), []
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            queue.submit(fail)  # type: ignore[arg-type]
    queue.submit(giving(lambda: done.append(1)))
    queue.close()
    assert done == [1]


def test_a_closed_queue_takes_nothing_more() -> None:
    queue = open_queue(is_background=True)
    queue.close()
    queue.close()
    with pytest.raises(RecordingError) as caught:
        queue.submit(giving(fail))
    assert str(caught.value) == "the writer is closed"


def test_closing_joins_the_thread() -> None:
    queue = open_queue(is_background=True)
    queue.submit(giving(lambda: None))
    queue.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rollout-writer")] == []


def start_script(text: str) -> subprocess.Popen[str]:
    head = "import sys, threading\nfrom tests.support.test_threads import open_queue\n"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", head + text], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_process_that_ends_without_closing_finishes_what_was_queued() -> None:
    """The first job waits until this test has seen that the process's own code has come to its end."""
    process = start_script(
        "started = threading.Event()\n"
        "queue = open_queue(is_background=True)\n"
        "queue.submit(lambda: lambda: (started.set(), print(sys.stdin.readline(), end='')))\n"
        "queue.submit(lambda: lambda: print('second'))\n"
        "started.wait()\n"
        "print('end of the script', flush=True)\n"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "end of the script\n"
    output, errors = process.communicate("first\n", timeout=120)
    assert (process.returncode, output, errors) == (0, "first\nsecond\n", "")


def test_an_error_that_no_call_follows_is_logged() -> None:
    process = start_script("queue = open_queue(is_background=True)\nqueue.submit(lambda: lambda: 1 / 0)\n")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert errors == "a write failed; the next call raises this error: division by zero\n"


def test_a_forked_child_does_not_hang_and_does_not_do_its_parents_jobs() -> None:
    queue, gate, process_ids = open_queue(is_background=True), Gate(), []
    queue.submit(giving(gate.job))
    queue.submit(giving(lambda: process_ids.append(os.getpid())))
    assert gate.has_begun.wait(60)

    def use_in_child() -> None:
        queue.flush()
        done: list[int] = []
        queue.submit(giving(lambda: done.append(os.getpid())))
        queue.close()
        assert (done, process_ids) == ([os.getpid()], [])

    assert run_in_child(use_in_child) == "done"
    assert run_in_child(queue.close) == "done"
    gate.may_end.set()
    queue.close()
    assert process_ids == [os.getpid()]


def test_a_forked_child_makes_its_own_value_once() -> None:
    numbers = itertools.count(1)
    held = PerProcess(0, remake=lambda: next(numbers))

    def use_in_child() -> None:
        assert not held.is_own
        assert (held.get(), held.get(), held.is_own) == (1, 1, True)

    assert run_in_child(use_in_child) == "done"
    assert (held.get(), held.is_own) == (0, True)


def fail_with_one_thread() -> None:
    with without_inner_threads():
        assert torch.get_num_threads() == 1
        raise KeyError


def test_torchs_own_threads_are_given_back_even_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError):
        fail_with_one_thread()
    assert torch.get_num_threads() == before
