"""Steps are read ahead from a remote recording: the same answers and errors as without, in threads that end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import mock_scheduler.proxy.build
import mock_scheduler.proxy.read_ahead
import mock_scheduler.recording.reading.reader
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import CorruptRecordingError, RecordingError, StepInTwoFormsError, StepNotFoundError
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.recording.storage.remote import FsspecStorage
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.node_cache import FOLDER_VARIABLE, LIMIT_VARIABLE
from tests.proxy.players import Player, batch_of, digests, never, request, requests
from tests.recording.builders import make_contract

_THREADS = "rollout-reader"


@pytest.fixture
def location(tmp_path: Path) -> Iterator[str]:
    """An object store in this process's memory, with no recording yet."""
    place = f"memory://{tmp_path.name}"
    yield place
    files = fsspec.filesystem("memory")
    if files.exists(place):
        files.rm(place, recursive=True)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Every file opened, by its name, and whether a thread that reads ahead did it."""
    found: list[tuple[str, bool]] = []
    open_source = FsspecStorage.open_source

    def noted(self: FsspecStorage, name: str) -> object:
        found.append((name, threading.current_thread().name.startswith(_THREADS)))
        return open_source(self, name)

    monkeypatch.setattr(FsspecStorage, "open_source", noted)
    return found


def record(location: str, asked: list[RolloutRequest]) -> None:
    config = RolloutMockConfig(enable=True, mode="dump", dump_dir=location)
    with build_scheduler(config, Player, make_contract(), plan=asked) as scheduler:
        for item in asked:
            scheduler.get_batch(item)


def mocked(location: str, plan: list[RolloutRequest]) -> ProxyScheduler:
    config = RolloutMockConfig(enable=True, mode="mock", dump_dir=location)
    return build_scheduler(config, never, make_contract(), plan=plan)


def settle(scheduler: ProxyScheduler) -> None:
    """Waits for what is being read."""
    reading = scheduler._core._access._ahead._reading.get()
    for future in list(reading.steps.values()):
        future.exception()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(_THREADS)]


@pytest.mark.parametrize("has_plan", [True, False])
def test_steps_are_read_ahead_and_are_the_same_in_the_same_order(
    location: str, opened: list[tuple[str, bool]], has_plan: bool
) -> None:
    asked = requests(range(4))
    record(location, asked)
    with mocked(location, asked if has_plan else []) as scheduler:
        opened.clear()
        given = []
        for item in asked:
            given.append(scheduler.get_batch(item))
            settle(scheduler)
        assert digests(given) == digests(map(batch_of, asked))
        assert threads() != []
    assert threads() == []
    # Each step once, the first by the call itself; and none behind the last one.
    names = [f"train/step_{step:06d}.safetensors" for step in range(4)]
    assert sorted(opened) == [(names[0], False), *((name, True) for name in names[1:])]


def test_the_processes_of_a_node_fetch_a_step_once(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "node"))
    asked = requests(range(4))
    record(location, asked)
    kind, fetched = type(fsspec.filesystem("memory")), list[str]()
    cat_file = kind.cat_file

    def noted(self: object, path: str, **named: object) -> object:
        fetched.append(path.rpartition("/")[2])
        return cat_file(self, path, **named)

    monkeypatch.setattr(kind, "cat_file", noted)
    for _ in range(3):
        with mocked(location, asked) as scheduler:
            assert digests([scheduler.get_batch(item) for item in asked]) == digests(map(batch_of, asked))
    steps = sorted(name for name in fetched if name.startswith("step_"))
    assert steps == [f"step_{step:06d}.safetensors" for step in range(4)]


@pytest.mark.parametrize(
    ("has_plan", "read_by_calls"),
    [
        (True, ["val 0"]),
        # Validation comes every other step, which shows from its second request on.
        (False, ["val 0", "train 0", "val 2"]),
    ],
)
def test_what_comes_next_is_known_by_the_plan_or_by_what_was_asked(
    location: str, opened: list[tuple[str, bool]], has_plan: bool, read_by_calls: list[str]
) -> None:
    train, val = requests(range(5)), requests((0, 2, 4), mode="val")
    asked = [val[0], train[0], train[1], val[1], train[2], train[3], val[2], train[4]]
    record(location, asked)
    with mocked(location, asked if has_plan else []) as scheduler:
        opened.clear()
        given = []
        for item in asked:
            given.append(scheduler.get_batch(item))
            settle(scheduler)
    assert digests(given) == digests(map(batch_of, asked))
    assert [name for name, is_ahead in opened if not is_ahead] == [
        f"{mode}/step_{int(step):06d}.safetensors" for mode, step in map(str.split, read_by_calls)
    ]


@pytest.mark.parametrize("has_plan", [True, False])
def test_a_step_that_is_gone_is_named_by_the_call_that_asks_for_it(location: str, has_plan: bool) -> None:
    asked = requests(range(4))
    record(location, asked)
    files = fsspec.filesystem("memory")
    with mocked(location, asked if has_plan else []) as scheduler:
        files.rm_file(f"{location}/train/step_000002.safetensors")
        for item in asked[:2]:
            scheduler.get_batch(item)
            settle(scheduler)
        with pytest.raises(StepNotFoundError) as caught:
            scheduler.get_batch(asked[2])
    with pytest.raises(StepNotFoundError) as alone, mocked(location, []) as scheduler:
        scheduler.get_batch(asked[2])
    assert str(caught.value) == str(alone.value)
    assert str(caught.value).startswith(f"[Rollout Mock] Mock file not found: {location}/train/step_000002.safetensors")


def test_a_damaged_step_is_named_by_the_call_that_asks_for_it(location: str) -> None:
    asked = requests(range(4))
    record(location, asked)
    files = fsspec.filesystem("memory")
    path = f"{location}/train/step_000002.safetensors"
    data = bytearray(files.cat_file(path))
    data[-1] ^= 1
    files.pipe_file(path, bytes(data))
    with mocked(location, []) as scheduler:
        for item in asked[:2]:
            scheduler.get_batch(item)
            settle(scheduler)
        with pytest.raises(
            CorruptRecordingError, match=r"step_000002\.safetensors: tensor .* does not match its digest"
        ):
            scheduler.get_batch(asked[2])


def test_a_store_that_failed_only_ahead_of_the_call_fails_nothing(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(range(4))
    record(location, asked)
    open_source = FsspecStorage.open_source
    failed = []

    def failing(self: FsspecStorage, name: str) -> object:
        if threading.current_thread().name.startswith(_THREADS):
            failed.append(name)
            raise RecordingError("the store does not answer")
        return open_source(self, name)

    with mocked(location, asked) as scheduler:
        monkeypatch.setattr(FsspecStorage, "open_source", failing)
        given = []
        for item in asked:
            given.append(scheduler.get_batch(item))
            settle(scheduler)
    assert len(set(failed)) == 3
    assert digests(given) == digests(map(batch_of, asked))


def test_a_step_over_the_bound_is_not_held(
    location: str, opened: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(range(3))
    record(location, asked)
    monkeypatch.setattr(mock_scheduler.proxy.read_ahead, "_MAX_STEP_BYTES", 100)
    with mocked(location, asked) as scheduler:
        opened.clear()
        for item in asked:
            scheduler.get_batch(item)
            settle(scheduler)
    assert len([name for name, is_ahead in opened if not is_ahead]) == 3


class TestLongPlan:
    """Of more steps than are checked at the start, those between are looked for beside the run."""

    @pytest.fixture(autouse=True)
    def _few_are_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (mock_scheduler.recording.reading.reader, mock_scheduler.proxy.build):
            monkeypatch.setattr(module, "MOST_CHECKED", 4)

    def test_its_start_asks_as_much_as_that_of_a_shorter_one(
        self, location: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(LIMIT_VARIABLE, "0")  # else the second start finds on this node what the first one fetched
        record(location, requests(range(12)))
        called: list[str] = []
        kind = type(fsspec.filesystem("memory"))

        def count(name: str) -> None:
            method = getattr(kind, name)

            def counted(*args: object, **named: object) -> object:
                if not threading.current_thread().name.startswith(_THREADS):
                    called.append(name)
                return method(*args, **named)

            monkeypatch.setattr(kind, name, counted)

        for name in ("cat_file", "info", "ls", "exists"):
            count(name)
        counts = []
        for num_steps in (6, 12):
            called.clear()
            mocked(location, requests(range(num_steps))).close()
            counts.append(sorted(called))
        assert counts[0] == counts[1]
        assert counts[0].count("cat_file") == 5  # the manifest, and the steps that are checked

    @pytest.mark.parametrize("step", [1, 10])
    def test_a_damaged_step_at_either_end_is_refused_at_the_start(self, location: str, step: int) -> None:
        record(location, requests(range(12)))
        fsspec.filesystem("memory").pipe_file(f"{location}/train/step_{step:06d}.safetensors", b"no step")
        with pytest.raises(CorruptRecordingError, match=f"step_{step:06d}"):
            mocked(location, requests(range(12)))

    def test_an_absent_step_is_named_at_the_start_or_by_the_next_call(self, location: str) -> None:
        record(location, requests(range(12)))
        with pytest.raises(StepNotFoundError, match="step_000012"):
            mocked(location, requests(range(13)))
        fsspec.filesystem("memory").rm_file(f"{location}/train/step_000006.safetensors")
        with mocked(location, requests(range(12))) as scheduler:
            listing = scheduler._core._access._listing
            assert listing is not None
            listing.exception()
            with pytest.raises(StepNotFoundError, match="step_000006"):
                scheduler.get_batch(request(0))

    def test_a_listing_that_failed_is_begun_again_and_names_what_it_then_finds(
        self, location: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One answer that the store owed ended a good run, and every call after it."""
        asked = requests(range(12))
        record(location, asked)
        list_names = FsspecStorage.list_names
        failures = [RecordingError("the store does not answer"), RecordingError("nor now")]

        def failing(self: FsspecStorage, folder: str) -> list[str]:
            if failures and threading.current_thread().name.startswith(_THREADS):
                raise failures.pop()
            return list_names(self, folder)

        monkeypatch.setattr(FsspecStorage, "list_names", failing)
        with mocked(location, asked) as scheduler:
            for item in asked[:3]:
                listing = scheduler._core._access._listing
                assert listing is not None
                listing.exception()
                scheduler.get_batch(item)
            assert failures == []
            assert listing.exception() is None
        assert [line for line in caplog.messages if "which is tried again: nor now" in line] != []
        path = f"{location}/train/step_000006.safetensors"
        fsspec.filesystem("memory").cp_file(path, f"{path}.zst")
        with mocked(location, asked) as scheduler:
            listing = scheduler._core._access._listing
            assert listing is not None
            listing.exception()
            with pytest.raises(StepInTwoFormsError, match="are the same step"):
                scheduler.get_batch(asked[0])
