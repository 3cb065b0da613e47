"""Asynchronous schedulers and pipelines."""

import asyncio
import gc
import os
import re
import signal
import threading
from collections.abc import Awaitable, Callable
from itertools import product
from pathlib import Path
from typing import TypeVar

import pytest

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import BatchError, ContractError, RecordingError
from mock_scheduler.proxy.async_scheduler import AsyncProxyScheduler
from mock_scheduler.proxy.build import build_async_scheduler, build_scheduler
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.recording.writing.opening import RecordingWriter
from mock_scheduler.scheduler import RolloutRequest
from tests.proxy.players import (
    AsyncPlayer,
    Player,
    batch_of,
    config,
    digests,
    dump,
    mock,
    never,
    play,
    request,
    requests,
)
from tests.recording.builders import make_contract
from tests.recording.processes import run_in_child

# Python 3.12 warns of a fork beside threads: the child that is forked here uses none of them.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

T = TypeVar("T")


def run(main: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(main(), timeout=60)

    return asyncio.run(bounded())


async def async_play(scheduler: AsyncProxyScheduler, steps: range) -> list[RolloutBatch]:
    batches = []
    for step in steps:
        await scheduler.update_weights(step)
        await scheduler.resume()
        batches.append(await scheduler.get_batch(request(step)))
        await scheduler.suspend()
    return batches


@pytest.mark.parametrize("make_real", [Player, AsyncPlayer])
def test_an_async_pipeline_records_and_replays(tmp_path: Path, make_real: type) -> None:
    expected = {"policy_version": 2, "last_steps": {"train": 2}, "scheduler": {"cursor": 3}}

    async def record() -> dict[str, dict[str, int]]:
        async with build_async_scheduler(config(tmp_path, "dump"), make_real, make_contract()) as scheduler:
            await async_play(scheduler, range(3))
            assert await scheduler.collect_metrics() == {"time/rollout_s": 0.25, "batches": 3.0}
            assert await scheduler.state_dict() == {"mode": "dump", **expected}
            assert RecordingReader(str(tmp_path / "x")).steps() == {"train": [0, 1, 2]}
        return scheduler.ledger.as_dict()

    async def replay() -> list[RolloutBatch]:
        async with build_async_scheduler(config(tmp_path, "mock"), never, make_contract()) as scheduler:
            batches = await async_play(scheduler, range(3))
            assert await scheduler.state_dict() == {"mode": "mock", **expected}
            await scheduler.load_state_dict(await scheduler.state_dict())
            await scheduler.checkpoint_saved(3)
            assert (await scheduler.collect_metrics())["recorded/batches"] == 3.0
        return batches

    ledger = run(record)
    assert ledger["called"]["get_batch"] == ledger["called"]["suspend"] == ledger["recording"]["recorded_steps"] == 3
    assert digests(run(replay)) == digests(map(batch_of, requests(range(3))))


@pytest.mark.parametrize("mode", ["cache", "verify", "real"])
def test_other_modes_are_the_same_asynchronously(tmp_path: Path, mode: str) -> None:
    dump(tmp_path, range(2))

    async def main() -> tuple[list[RolloutBatch], dict[str, int]]:
        async with build_async_scheduler(config(tmp_path, mode), AsyncPlayer, make_contract()) as scheduler:
            steps = range(3 if mode != "verify" else 2)
            return await async_play(scheduler, steps), scheduler.ledger.as_dict()["called"]

    batches, called = run(main)
    assert digests(batches) == digests(map(batch_of, requests(range(len(batches)))))
    assert called["get_batch"] == {"cache": 1, "verify": 2, "real": 3}[mode]


def test_a_difference_is_raised_asynchronously(tmp_path: Path) -> None:
    dump(tmp_path, [0])

    class Other(AsyncPlayer):
        async def get_batch(self, item: RolloutRequest) -> object:
            return batch_of(request(5))

    async def main() -> None:
        await build_async_scheduler(config(tmp_path, "verify"), Other, make_contract()).get_batch(request(0))

    with pytest.raises(ContractError, match="train step 0 was not played as it is recorded"):
        run(main)


def test_an_async_scheduler_works_behind_a_synchronous_pipeline_on_one_loop(tmp_path: Path) -> None:
    real = AsyncPlayer()
    with build_scheduler(config(tmp_path, "dump"), lambda: real, make_contract()) as scheduler:
        play(scheduler, range(3))
        assert scheduler.collect_metrics()["batches"] == 3.0
    assert real.player.calls[-1] == "close"
    assert len(real.loops) == 1
    assert digests(play(mock(tmp_path), range(3))) == digests(map(batch_of, requests(range(3))))


class Generating(AsyncPlayer):
    """Generates in a background task of its loop; a batch is what is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: asyncio.Queue[RolloutBatch] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    async def _generate(self) -> None:
        for step in range(3):
            self.ready.put_nowait(batch_of(request(step)))
            await asyncio.sleep(0)
        await asyncio.Event().wait()

    async def get_batch(self, item: RolloutRequest) -> object:
        self.task = self.task or asyncio.ensure_future(self._generate())
        return await self.ready.get()


def test_background_tasks_of_an_async_scheduler_go_on_between_calls_and_end_with_it() -> None:
    real = Generating()

    async def make_real() -> Generating:
        await asyncio.sleep(0)
        return real

    with build_scheduler(RolloutMockConfig(), make_real, make_contract()) as scheduler:
        assert digests(play(scheduler, range(3))) == digests(map(batch_of, requests(range(3))))
        assert real.task is not None
        assert not real.task.done()
    assert real.task.cancelled()
    assert not any(thread.name == "rollout-scheduler" for thread in threading.enumerate())


def test_an_interrupt_cancels_the_call_once_and_its_cleanup_goes_on() -> None:
    """A portal's own task would be cancelled again at each await of the cleanup."""

    class Stuck(AsyncPlayer):
        async def get_batch(self, item: RolloutRequest) -> object:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                cleaned.set()
                raise
            return batch_of(item)

    begun, cleaned = threading.Event(), threading.Event()

    def interrupt() -> None:
        begun.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    scheduler = build_scheduler(RolloutMockConfig(), Stuck, make_contract())
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        scheduler.get_batch(request(0))
    interrupting.join()
    scheduler.close()
    assert cleaned.is_set()


def test_a_scheduler_that_nobody_closed_ends_its_loop_when_it_is_gone() -> None:
    real = Generating()
    scheduler = build_scheduler(RolloutMockConfig(), lambda: real, make_contract())
    scheduler.get_batch(request(0))
    del scheduler
    gc.collect(1)
    assert real.task is not None
    assert real.task.cancelled()
    assert not any(thread.name == "rollout-scheduler" for thread in threading.enumerate())


def test_an_async_exception_passes_unchanged_through_both_front_ends(tmp_path: Path) -> None:
    error = KeyError("environment 7 died")

    class Exploding(AsyncPlayer):
        async def get_batch(self, item: RolloutRequest) -> object:
            raise error

    with build_scheduler(config(tmp_path, "dump"), Exploding, make_contract()) as scheduler:
        with pytest.raises(KeyError) as caught:
            scheduler.get_batch(request(0))
        assert caught.value is error

    async def main() -> None:
        await build_async_scheduler(config(tmp_path / "a", "dump"), Exploding, make_contract()).get_batch(request(0))

    with pytest.raises(KeyError) as caught:
        run(main)
    assert caught.value is error


def test_a_stop_iteration_in_a_thread_does_not_hang_the_loop() -> None:
    """A future that is given a StopIteration is never done."""

    class Exhausted:
        def get_batch(self, item: RolloutRequest) -> object:
            raise StopIteration("no data left")

    async def main() -> None:
        await build_async_scheduler(RolloutMockConfig(), Exhausted, make_contract()).get_batch(request(0))

    with pytest.raises(RuntimeError) as caught:
        run(main)
    assert isinstance(caught.value.__cause__, StopIteration)


def test_calls_for_several_schedulers_and_kinds_may_run_at_the_same_time(tmp_path: Path) -> None:
    asked = [
        request(step, mode=mode, scheduler_id=name)
        for step, (mode, name) in enumerate(product(("train", "val"), ("default", "math")))
    ]
    arrived = 0
    together = asyncio.Event()

    class Meeting(AsyncPlayer):
        """Answers nobody before all have asked."""

        async def get_batch(self, item: RolloutRequest) -> object:
            nonlocal arrived
            arrived += 1
            if arrived == len(asked):
                together.set()
            await together.wait()
            return batch_of(item)

    async def record() -> list[RolloutBatch]:
        async with build_async_scheduler(config(tmp_path, "dump"), Meeting, make_contract()) as scheduler:
            batches = await asyncio.gather(*(scheduler.get_batch(item) for item in asked))
            assert scheduler.ledger.as_dict()["built"]["scheduler"] == 1
            last_steps = (await scheduler.state_dict())["last_steps"]
            assert last_steps == {"train": 0, "train.math": 1, "val": 2, "val.math": 3}
        return batches

    async def replay() -> list[RolloutBatch]:
        scheduler = build_async_scheduler(config(tmp_path, "mock"), never, make_contract(), plan=asked)
        return await asyncio.gather(*(scheduler.get_batch(item) for item in asked))

    expected = digests(map(batch_of, asked))
    assert digests(run(record)) == expected
    assert digests(run(replay)) == expected


def test_a_synchronous_scheduler_plays_one_batch_at_a_time(tmp_path: Path) -> None:
    class Single(Player):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()
            self.threads: set[int] = set()

        def get_batch(self, item: RolloutRequest) -> RolloutBatch:
            assert self.lock.acquire(blocking=False), "two batches at once"
            self.threads.add(threading.get_ident())
            batch = super().get_batch(item)
            self.lock.release()
            return batch

    real = Single()
    asked = [request(0, mode=mode, scheduler_id=name) for mode in ("train", "val") for name in ("default", "math")]

    async def main() -> None:
        async with build_async_scheduler(config(tmp_path, "dump"), lambda: real, make_contract()) as scheduler:
            await asyncio.gather(*(scheduler.get_batch(item) for item in asked))
            assert threading.get_ident() not in real.threads

    run(main)
    reader = RecordingReader(str(tmp_path / "x"))
    cursors = [reader.load_step(item).info.scheduler_state["cursor"] for item in asked]
    metrics = [reader.load_step(item).info.metrics["batches"] for item in asked]
    assert sorted(cursors) == [1, 2, 3, 4]
    assert metrics == [float(cursor) for cursor in cursors]


def test_a_call_that_is_cancelled_while_it_plays_leaves_nothing(tmp_path: Path) -> None:
    class Waiting(AsyncPlayer):
        def __init__(self) -> None:
            super().__init__()
            self.started = asyncio.Event()
            self.waits = True

        async def get_batch(self, item: RolloutRequest) -> object:
            self.started.set()
            if self.waits:
                await asyncio.Event().wait()
            return await super().get_batch(item)

    async def main() -> None:
        real = Waiting()
        async with build_async_scheduler(config(tmp_path, "dump"), lambda: real, make_contract()) as scheduler:
            call = asyncio.ensure_future(scheduler.get_batch(request(0)))
            await real.started.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not (tmp_path / "x/train").exists()
            assert (await scheduler.state_dict())["last_steps"] == {}
            real.waits = False
            await scheduler.get_batch(request(0))

    run(main)
    assert mock(tmp_path).get_batch(request(0)).is_identical(batch_of(request(0)))


def test_a_call_that_is_cancelled_while_its_batch_is_recorded_gives_that_batch_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played again, the step would differ from the one that is recorded, and could not be recorded any more."""
    begun, may_go_on = threading.Event(), threading.Event()
    submit = RecordingWriter.submit

    def submit_late(writer: RecordingWriter, batch: RolloutBatch, info: StepInfo) -> None:
        begun.set()
        may_go_on.wait()
        submit(writer, batch, info)

    monkeypatch.setattr(RecordingWriter, "submit", submit_late)

    class Random(AsyncPlayer):
        async def get_batch(self, item: RolloutRequest) -> object:
            self.player.cursor += 1
            return batch_of(request(10 * self.player.cursor))

    async def main() -> RolloutBatch:
        async with build_async_scheduler(config(tmp_path, "dump"), Random, make_contract()) as scheduler:
            call = asyncio.ensure_future(scheduler.get_batch(request(0)))
            await asyncio.to_thread(begun.wait)
            call.cancel()
            await asyncio.sleep(0)
            assert not call.done()
            may_go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await call
            batch = await scheduler.get_batch(request(0))
            assert scheduler.ledger.as_dict()["called"]["get_batch"] == 1
            return batch

    delivered = run(main)
    assert mock(tmp_path).get_batch(request(0)).is_identical(delivered)


def test_a_cancelled_synchronous_scheduler_is_through_before_the_next_call_begins(tmp_path: Path) -> None:
    begun, may_end = threading.Event(), threading.Event()
    running = 0

    class Blocking(Player):
        def get_batch(self, item: RolloutRequest) -> RolloutBatch:
            nonlocal running
            running += 1
            assert running == 1
            begun.set()
            may_end.wait()
            running -= 1
            return super().get_batch(item)

    async def main() -> None:
        async with build_async_scheduler(config(tmp_path, "dump"), Blocking, make_contract()) as scheduler:
            call = asyncio.ensure_future(scheduler.get_batch(request(0)))
            await asyncio.to_thread(begun.wait)
            call.cancel()
            second = asyncio.ensure_future(scheduler.get_batch(request(0)))
            await asyncio.sleep(0)
            may_end.set()
            with pytest.raises(asyncio.CancelledError):
                await call
            await second

    run(main)
    assert RecordingReader(str(tmp_path / "x")).steps() == {"train": [0]}


def test_a_synchronous_proxy_serves_several_threads(tmp_path: Path) -> None:
    asked = [request(step, mode=mode) for step in range(3) for mode in ("train", "val")]
    failures: list[BaseException] = []
    with build_scheduler(config(tmp_path, "dump"), AsyncPlayer, make_contract()) as scheduler:

        def serve(item: RolloutRequest) -> None:
            try:
                assert scheduler.get_batch(item).is_identical(batch_of(item))
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=serve, args=(item,)) for item in asked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert scheduler.ledger.as_dict()["built"]["scheduler"] == 1
    mock(tmp_path, plan=asked)


def test_one_proxy_serves_one_event_loop_after_another() -> None:
    """A lock that two calls had waited for belonged to the first loop: RuntimeError on the second."""

    class Contended(Player):
        def get_batch(self, item: RolloutRequest) -> RolloutBatch:
            both.wait(60)
            return super().get_batch(item)

    scheduler = build_async_scheduler(RolloutMockConfig(), Contended, make_contract())
    for step in range(3):
        both = threading.Event()

        async def main(step: int = step, both: threading.Event = both) -> list[RolloutBatch]:
            calls = [asyncio.ensure_future(scheduler.get_batch(request(step, mode=mode))) for mode in ("train", "val")]
            while not scheduler.ledger.as_dict()["called"].get("get_batch", 0) > 2 * step:
                await asyncio.sleep(0)
            both.set()
            return await asyncio.gather(*calls)

        expected = [batch_of(request(step, mode=mode)) for mode in ("train", "val")]
        assert digests(run(main)) == digests(expected)


def test_a_cancelled_call_does_not_swallow_the_writers_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled ``state_dict`` or ``close`` took the error with it: the next call told of nothing."""
    begun, may_fail = threading.Event(), threading.Event()

    def fail(writer: RecordingWriter) -> None:
        begun.set()
        may_fail.wait(60)
        flush(writer)

    flush = RecordingWriter.flush
    monkeypatch.setattr(RecordingWriter, "flush", fail)

    async def main() -> None:
        scheduler = build_async_scheduler(config(tmp_path, "dump"), Player, make_contract())
        await scheduler.get_batch(request(0))
        (tmp_path / "x/train").mkdir(parents=True, exist_ok=True)
        call = asyncio.ensure_future(scheduler.state_dict())
        await asyncio.to_thread(begun.wait)
        call.cancel()
        await asyncio.sleep(0)
        may_fail.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        for _ in range(2):
            with pytest.raises(RecordingError, match="in the way"):
                await scheduler.state_dict()
        for _ in range(2):
            with pytest.raises(RecordingError, match="in the way"):
                await scheduler.close()

    def refuse(*_arguments: object) -> None:
        raise RecordingError("something is in the way")

    monkeypatch.setattr(RecordingWriter, "_write", refuse)
    run(main)


def test_a_cancelled_close_does_not_lose_the_writers_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(AsyncPlayer):
        async def close(self) -> None:
            closing.set()
            await asyncio.Event().wait()

    def refuse(*_arguments: object) -> None:
        raise RecordingError("something is in the way")

    monkeypatch.setattr(RecordingWriter, "_write", refuse)
    closing = asyncio.Event()

    async def main() -> None:
        scheduler = build_async_scheduler(config(tmp_path, "dump"), Stuck, make_contract())
        await scheduler.get_batch(request(0))
        call = asyncio.ensure_future(scheduler.close())
        await closing.wait()
        call.cancel()
        with pytest.raises(RecordingError, match="in the way"):
            await call
        with pytest.raises(RecordingError, match="in the way"):
            await scheduler.close()

    run(main)


def test_a_forked_child_is_told_to_build_its_own_scheduler() -> None:
    """It waited for ever on an event loop whose thread is its parent's."""
    scheduler = build_scheduler(RolloutMockConfig(), AsyncPlayer, make_contract())
    scheduler.get_batch(request(0))
    answer = run_in_child(lambda: scheduler.get_batch(request(1)))
    assert re.fullmatch(
        rf"SchedulerError: the rollout scheduler runs on an event loop of process {os.getpid()}, from which this "
        r"process \d+ was forked: it cannot be used here\. Build it after forking, in each process that uses it\.",
        answer,
    )
    assert run_in_child(lambda: build_scheduler(RolloutMockConfig(), AsyncPlayer, make_contract()).close()) == "done"
    assert scheduler.get_batch(request(1)).is_identical(batch_of(request(1)))
    scheduler.close()


def test_a_wrong_answer_is_refused_asynchronously() -> None:
    async def main() -> None:
        scheduler = build_async_scheduler(RolloutMockConfig(), AsyncPlayer, make_contract())
        await scheduler.get_batch(request(0, batch_size=8))

    with pytest.raises(BatchError, match="returned 4 trajectories; 8 were asked for"):
        run(main)
