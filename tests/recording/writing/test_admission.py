"""Whether a recording will fit is told before the disk is full."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from mock_scheduler.errors import RecordingError
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.storage.local import LocalStorage
from mock_scheduler.recording.writing.admission import DiskForecast
from mock_scheduler.recording.writing.opening import RecordingWriter, WriterOptions, open_recording
from mock_scheduler.scheduler import RolloutRequest, RowShard
from tests.recording.builders import make_batch, make_contract, make_info


class SmallDisk(LocalStorage):
    """A folder whose disk has as much space as a test says."""

    def __init__(self, location: str, free_bytes: int | None) -> None:
        super().__init__(location)
        self.free = free_bytes

    def free_bytes(self) -> int | None:
        return self.free


def all_kept(num_remaining: int) -> int:
    return num_remaining


def forecast(free_bytes: int | None, **changes: object) -> tuple[DiskForecast, SmallDisk]:
    disk = SmallDisk("/recordings/a", free_bytes)
    return DiskForecast(disk, **{"num_planned": 11, "on_low_disk": "error", **changes}), disk


def test_steps_that_just_fit_are_no_problem() -> None:
    found, _ = forecast(free_bytes=10 * 2048)
    found.add_step(2048, count_kept=all_kept)


def test_steps_that_do_not_fit_end_the_run_with_all_numbers() -> None:
    found, _ = forecast(free_bytes=10 * 2048 - 1)
    with pytest.raises(RecordingError) as caught:
        found.add_step(2048, count_kept=all_kept)
    assert str(caught.value) == (
        "[Rollout Mock] The disk will be full before the recording ends: a step takes 2.0 KiB (average of 1), and 10 "
        "more will be kept. They need 20.0 KiB; 20.0 KiB are free in /recordings/a. Free space, set another "
        "rollout_mock.dump_dir, record fewer steps (rollout_mock.every, rollout_mock.steps), keep fewer "
        "(rollout_mock.retention.keep_last) or compress them (rollout_mock.compression: zstd). To go on all the same: "
        "rollout_mock.on_low_disk: warn."
    )


def test_the_average_and_what_remains_are_reckoned_anew_at_every_step() -> None:
    found, disk = forecast(free_bytes=10 * 1000)
    found.add_step(1000, count_kept=all_kept)
    disk.free = 9 * 2000  # average of 1000 and 3000, for 9 more
    found.add_step(3000, count_kept=all_kept)
    disk.free = 8 * 2000 - 1
    with pytest.raises(RecordingError, match=r"\(average of 3\), and 8 more will be kept\. They need 15\.6 KiB"):
        found.add_step(2000, count_kept=all_kept)


def test_shards_that_others_write_onto_the_same_disk_are_counted() -> None:
    found, _ = forecast(free_bytes=10 * 4 * 1024 - 1, num_writers=4)
    with pytest.raises(RecordingError, match=r"10 more will be kept by each of 4 writers\. They need 40\.0 KiB"):
        found.add_step(1024, count_kept=all_kept)


def test_only_what_retention_keeps_is_needed() -> None:
    found, _ = forecast(free_bytes=3 * 1000)
    found.add_step(1000, count_kept=lambda num_remaining: min(num_remaining, 3))
    with pytest.raises(RecordingError, match="and 4 more will be kept"):
        found.add_step(1000, count_kept=lambda num_remaining: min(num_remaining, 4))


def test_a_warning_is_given_once_and_again_after_there_was_space(caplog: pytest.LogCaptureFixture) -> None:
    found, disk = forecast(free_bytes=0, on_low_disk="warn")
    counts = []
    for free in (0, 0, 10**9, 0):
        disk.free = free
        found.add_step(1000, count_kept=all_kept)
        counts.append(len(caplog.records))
    assert counts == [1, 1, 1, 2]
    assert caplog.records[0].levelno == logging.WARNING
    assert (
        caplog.records[0]
        .getMessage()
        .startswith(
            "[Rollout Mock] The disk will be full before the recording ends: a step takes 1.0 KiB (average of 1), "
            "and 10 more will be kept. They need 9.8 KiB; 0 B are free in /recordings/a."
        )
    )


@pytest.mark.parametrize(("free_bytes", "num_planned"), [(None, 10), (0, 1), (0, 0)])
def test_without_a_bound_or_a_plan_nothing_is_forecast(free_bytes: int | None, num_planned: int) -> None:
    found, _ = forecast(free_bytes, num_planned=num_planned)
    found.add_step(1000, count_kept=all_kept)


def test_the_largest_size_possible_is_a_warning_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """128 rows of 8192 tokens: 8.125 bytes each, 512 bytes a row and 64 KiB a step."""
    requests = [RolloutRequest(global_step=step, batch_size=128) for step in range(1000)]
    bound = 1000 * (128 * (8192 * 8.125 + 512) + 65536)
    found, disk = forecast(free_bytes=int(bound))
    found.warn_of_largest(requests, max_row_tokens=8192)
    assert caplog.records == []
    disk.free = int(bound) - 1
    found.warn_of_largest(requests, max_row_tokens=8192)
    assert [record.getMessage() for record in caplog.records] == [
        "[Rollout Mock] If every row had max_row_tokens (8192), 1000 steps would take up to 8.1 GiB; 8.1 GiB are free "
        "in /recordings/a. The first step's size will tell more."
    ]


# --------------------------------------------------------------------------------------------------------- in a writer


@pytest.fixture
def with_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_free(free_bytes: int) -> None:
        monkeypatch.setattr(LocalStorage, "free_bytes", lambda _self: free_bytes)

    return set_free


def open_writer(dump_dir: Path, **options: object) -> RecordingWriter:
    return open_recording(
        str(dump_dir),
        contract=make_contract(),
        plan=[RolloutRequest(global_step=step, batch_size=4) for step in range(100)],
        provenance={},
        resume=False,
        options=WriterOptions(**{"num_planned_steps": 100, **options}),
        max_row_tokens=7,
    )


@pytest.mark.parametrize("is_background", [True, False])
def test_a_run_ends_after_its_first_step_and_not_at_a_full_disk(
    tmp_path: Path, with_free: Callable[[int], None], is_background: bool
) -> None:
    with_free(10_000)
    writer = open_writer(tmp_path, background=is_background)

    def give_all() -> None:
        for step in range(100):
            writer.submit(make_batch(seed=step), make_info(step, run_id=writer.run_id))

    with pytest.raises(RecordingError, match=r"\(average of 1\), and 99 more will be kept\. They need"):
        give_all()
    with pytest.raises(RecordingError, match="Nothing more is recorded, since an earlier write failed"):
        writer.close()
    assert RecordingReader(str(tmp_path)).steps() == {"train": [0]}


def test_a_run_that_only_warns_goes_on(
    tmp_path: Path, with_free: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    with_free(10_000)
    writer = open_writer(tmp_path, on_low_disk="warn")
    for step in range(3):
        writer.submit(make_batch(seed=step), make_info(step, run_id=writer.run_id))
    writer.close()
    assert RecordingReader(str(tmp_path)).steps() == {"train": [0, 1, 2]}
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "[Rollout Mock] If every row had max_row_tokens (7), 100 steps would take up to 6.5 MiB; 9.8 KiB are free in "
        f"{tmp_path}. The first step's size will tell more.".split(":")[0],
        "[Rollout Mock] The disk will be full before the recording ends",
    ]


def test_each_shard_reckons_with_the_others(tmp_path: Path, with_free: Callable[[int], None]) -> None:
    with_free(10_000)
    writer = open_writer(tmp_path, shard=RowShard(index=1, count=2), background=False)
    with pytest.raises(RecordingError, match="by each of 2 writers"):
        writer.submit(make_batch(), make_info(0, run_id=writer.run_id))
