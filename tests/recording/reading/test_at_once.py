"""Steps of a remote recording are read at once, in their order, and a few ahead at most."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import pytest

from mock_scheduler.config.steps import StepRanges
from mock_scheduler.recording.inspection.description import describe_recording
from mock_scheduler.recording.inspection.verification import verify_recording
from mock_scheduler.recording.reading.at_once import map_steps
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.recording.storage.remote import FsspecStorage
from tests.recording.recordings import record

REMOTE, LOCAL = open_storage("memory://at-once"), open_storage("at-once")


def test_a_few_are_read_ahead_and_given_in_their_order() -> None:
    begun, at_once = list[int](), threading.Barrier(8)

    def read(item: int) -> int:
        begun.append(item)
        if item < 8:
            at_once.wait(timeout=10)  # for all eight
        return item

    found = map_steps(REMOTE, read, range(100))
    assert next(found) == 0
    assert sorted(begun[:8]) == list(range(8))
    assert len(begun) <= 8
    assert list(found) == list(range(1, 100))


def test_of_a_folder_one_is_read_after_the_other() -> None:
    begun: list[int] = []
    found = map_steps(LOCAL, lambda item: begun.append(item), range(3))
    next(found)
    assert begun == [0]


def test_the_first_error_in_the_order_is_raised_and_no_more_is_begun() -> None:
    begun: list[int] = []

    def read(item: int) -> int:
        begun.append(item)
        if item >= 2:
            raise ValueError(f"item {item}")
        return item

    found = map_steps(REMOTE, read, range(1000))
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(ValueError, match="item 2"):
        next(found)
    assert len(begun) <= 10


def test_a_remote_recording_is_described_and_verified_as_a_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{uuid.uuid4()}"
    record(url, range(20))
    files = FsspecStorage(url)._files
    damaged = f"{url}/train/step_000007.safetensors"
    content = bytearray(files.cat_file(damaged))
    content[-1] ^= 1
    files.pipe_file(damaged, bytes(content))
    monkeypatch.chdir(tmp_path)
    files.get(url, str(tmp_path / "copy"), recursive=True)
    found = [RecordingReader(place) for place in (url, "copy")]
    there, here = (describe_recording(reader, StepRanges.parse("2-")) for reader in found)
    assert [step.step for step in there.folders[0].steps] == [step for step in range(2, 20) if step != 7]
    assert there.folders == here.folders
    assert [problem.replace(url, "copy") for problem in there.problems] == list(here.problems)
    assert len(here.problems) == 1
    seen: list[tuple[int, int]] = []
    results = verify_recording(url, on_step=lambda *step: seen.append(step)), verify_recording("copy")
    assert seen == [(number, 20) for number in range(1, 21)]
    assert results[0].num_bytes == results[1].num_bytes
    assert [problem.replace(url, "copy") for problem in results[0].problems] == list(results[1].problems)
    assert len(results[0].problems) == 1
    assert "step_000007" in results[0].problems[0]
