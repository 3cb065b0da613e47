"""A batch that the real scheduler gave is not lost by what fails or is cancelled on its way to the pipeline."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import BatchError, SchedulerError
from mock_scheduler.proxy.build import build_async_scheduler, build_scheduler
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.scheduler import RolloutRequest
from tests.proxy.players import Player, batch_of, config, dump, request
from tests.recording.builders import make_contract

T = TypeVar("T")


def run(main: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(main(), timeout=60)

    return asyncio.run(bounded())


class Loader(Player):
    """Gives the batches of a data set one after another, whatever is asked for; one call of a method fails."""

    def __init__(self, failing: str | None = None) -> None:
        super().__init__()
        self.failing = failing

    def _fail_once(self, name: str) -> None:
        if self.failing == name:
            self.failing = None
            raise TimeoutError(name)

    def get_batch(self, item: RolloutRequest) -> RolloutBatch:
        self.cursor += 1
        return batch_of(request(self.cursor - 1))

    def collect_metrics(self) -> dict[str, float]:
        self.calls.append("collect_metrics")
        self._fail_once("collect_metrics")
        return {"batches": float(self.cursor)}

    def state_dict(self) -> dict[str, object]:
        self._fail_once("state_dict")
        return {"cursor": self.cursor}


@pytest.mark.parametrize("mode", ["dump", "verify"])
@pytest.mark.parametrize("failing", ["collect_metrics", "state_dict"])
def test_an_exception_after_the_batch_does_not_lose_it(tmp_path: Path, mode: str, failing: str) -> None:
    """The next call took the next batch of the data, and recorded it as this step's."""
    if mode == "verify":
        dump(tmp_path, [0])
        failing = "state_dict"
    real = Loader(failing)
    with build_scheduler(config(tmp_path, mode), lambda: real, make_contract()) as scheduler:
        with pytest.raises(TimeoutError):
            scheduler.get_batch(request(0))
        assert scheduler.get_batch(request(0)).is_identical(batch_of(request(0)))
    assert real.cursor == 1
    step = RecordingReader(str(tmp_path / "x")).load_step(request(0))
    assert step.batch.is_identical(batch_of(request(0)))
    assert step.info.scheduler_state == {"cursor": 1}


def test_metrics_are_asked_for_once_per_batch_also_where_a_later_call_fails(tmp_path: Path) -> None:
    real = Loader("state_dict")
    with build_scheduler(config(tmp_path, "dump"), lambda: real, make_contract()) as scheduler:
        with pytest.raises(TimeoutError):
            scheduler.get_batch(request(0))
        scheduler.get_batch(request(0))
    assert real.calls.count("collect_metrics") == 1


def test_a_wrong_answer_is_not_kept() -> None:
    real = Loader()
    scheduler = build_scheduler(RolloutMockConfig(), lambda: real, make_contract())
    with pytest.raises(BatchError):
        scheduler.get_batch(request(0, batch_size=8))
    assert scheduler.get_batch(request(0)).is_identical(batch_of(request(1)))


class Held(Loader):
    """Synchronous; waits in one of its methods until it may go on."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.held = held
        self.begun, self.may_end = threading.Event(), threading.Event()

    def _hold(self, name: str) -> None:
        if name == self.held:
            self.begun.set()
            assert self.may_end.wait(60)

    def get_batch(self, item: RolloutRequest) -> RolloutBatch:
        batch = super().get_batch(item)
        self._hold("get_batch")
        return batch

    def collect_metrics(self) -> dict[str, float]:
        self._hold("collect_metrics")
        return super().collect_metrics()

    def state_dict(self) -> dict[str, object]:
        self._hold("state_dict")
        return super().state_dict()


class AsyncHeld(Loader):
    """Asynchronous; its ``collect_metrics`` never ends the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.waits = asyncio.Event(), True

    async def get_batch(self, item: RolloutRequest) -> RolloutBatch:
        return super().get_batch(item)

    async def collect_metrics(self) -> dict[str, float]:
        self.begun.set()
        if self.waits:
            self.waits = False
            await asyncio.Event().wait()
        return super().collect_metrics()


@pytest.mark.parametrize(
    ("mode", "held"),
    [("real", "get_batch"), ("dump", "get_batch"), ("dump", "collect_metrics"), ("dump", "state_dict")],
)
def test_a_cancellation_after_the_batch_does_not_lose_it(tmp_path: Path, mode: str, held: str) -> None:
    """A synchronous scheduler works in a thread: what it gave after the cancellation was dropped, in every mode."""
    real = Held(held)

    async def main() -> RolloutBatch:
        async with build_async_scheduler(config(tmp_path, mode), lambda: real, make_contract()) as scheduler:
            call = asyncio.ensure_future(scheduler.get_batch(request(0)))
            await asyncio.to_thread(real.begun.wait)
            call.cancel()
            await asyncio.sleep(0)
            real.may_end.set()
            with pytest.raises(asyncio.CancelledError):
                await call
            return await scheduler.get_batch(request(0))

    assert run(main).is_identical(batch_of(request(0)))
    assert real.cursor == 1
    if mode == "dump":
        assert RecordingReader(str(tmp_path / "x")).load_step(request(0)).batch.is_identical(batch_of(request(0)))


def test_a_cancellation_does_not_lose_an_asynchronous_schedulers_batch(tmp_path: Path) -> None:
    async def main() -> tuple[RolloutBatch, int]:
        real = AsyncHeld()
        async with build_async_scheduler(config(tmp_path, "dump"), lambda: real, make_contract()) as scheduler:
            call = asyncio.ensure_future(scheduler.get_batch(request(0)))
            await real.begun.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return await scheduler.get_batch(request(0)), real.cursor

    batch, cursor = run(main)
    assert (batch.is_identical(batch_of(request(0))), cursor) == (True, 1)


def test_another_request_of_the_step_does_not_get_the_batch_and_is_told_what_differs(tmp_path: Path) -> None:
    """It got the batch unchecked: of other weights, data and prompts than it asked for."""
    with build_scheduler(config(tmp_path, "dump"), lambda: Loader("state_dict"), make_contract()) as scheduler:
        with pytest.raises(TimeoutError):
            scheduler.get_batch(request(0, data_cursor={"at": 0}))
        with pytest.raises(SchedulerError) as caught:
            scheduler.get_batch(request(0, data_cursor={"at": 7}, policy_version=9))
        assert str(caught.value) == (
            "train step 0: a batch that was played for this step has not reached the pipeline, which now asks for "
            "another one: policy_version was 0, now 9; data_cursor was {'at': 0}, now {'at': 7}. Ask as before to get "
            "it, or load the state of a checkpoint to play the step anew."
        )
        scheduler.get_batch(request(1))  # another step is not concerned
        assert scheduler.get_batch(request(0, data_cursor={"at": 0})).is_identical(batch_of(request(0)))


def test_a_state_that_is_loaded_forgets_the_batch() -> None:
    real = Held("get_batch")
    real.may_end.set()

    async def main() -> RolloutBatch:
        scheduler = build_async_scheduler(RolloutMockConfig(), lambda: real, make_contract())
        real.may_end.clear()
        call = asyncio.ensure_future(scheduler.get_batch(request(0)))
        await asyncio.to_thread(real.begun.wait)
        call.cancel()
        await asyncio.sleep(0)
        real.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        await scheduler.load_state_dict({"policy_version": 0, "last_steps": {}, "scheduler": {"cursor": 5}})
        return await scheduler.get_batch(request(0, policy_version=5))

    assert run(main).is_identical(batch_of(request(5)))


def test_two_calls_for_one_request_at_the_same_time_come_one_after_the_other(tmp_path: Path) -> None:
    """The second of an asynchronous scheduler's joined the first half way, and the batch was written twice."""

    class Meeting(Loader):
        def __init__(self) -> None:
            super().__init__()
            self.num_inside = 0

        async def get_batch(self, item: RolloutRequest) -> RolloutBatch:  # type: ignore[override]
            self.num_inside += 1
            assert self.num_inside == 1
            await asyncio.sleep(0)
            self.num_inside -= 1
            return batch_of(item)

    async def main() -> list[RolloutBatch]:
        scheduler = build_async_scheduler(RolloutMockConfig(), Meeting, make_contract())
        return await asyncio.gather(scheduler.get_batch(request(0)), scheduler.get_batch(request(0)))

    assert [batch.is_identical(batch_of(request(0))) for batch in run(main)] == [True, True]
