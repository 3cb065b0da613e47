"""Writing and reading step files on disk."""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from mock_scheduler.errors import (
    ContractError,
    CorruptRecordingError,
    RecordingError,
    StepExistsError,
    StepNotFoundError,
)
from mock_scheduler.recording import RecordingReader, RecordingWriter, open_recording, paths
from mock_scheduler.recording.paths import format_present, format_steps, list_steps, publish_file, step_path
from mock_scheduler.scheduler import RolloutRequest
from tests.recording.builders import make_batch, make_contract, make_info


def record(
    dump_dir: Path, steps: Iterable[int] = (0,), mode: str = "train", *, resume: bool = False, **info: object
) -> RecordingWriter:
    writer = open_recording(str(dump_dir), contract=make_contract(), plan=(), provenance={}, resume=resume)
    for step in steps:
        writer.write_step(make_batch(seed=step), make_info(step, mode=mode, run_id=writer.run_id, **info))
    return writer


def request(step: int, **changes: object) -> RolloutRequest:
    return RolloutRequest(**{"global_step": step, "batch_size": 4, **changes})


def test_a_recording_has_the_documented_layout(tmp_path: Path) -> None:
    record(tmp_path, [0, 12])
    record(tmp_path, [3], mode="val", resume=True, scheduler_id="math")
    found = sorted(
        os.path.relpath(os.path.join(root, f), tmp_path) for root, _, files in os.walk(tmp_path) for f in files
    )
    assert found == [
        "recording.json",
        "train/step_000000.safetensors",
        "train/step_000012.safetensors",
        "val.math/step_000003.safetensors",
    ]
    assert list_steps(str(tmp_path)) == {"train": [0, 12], "val.math": [3]}


def test_a_loaded_step_is_the_written_one(tmp_path: Path) -> None:
    record(tmp_path, [0, 1])
    reader = RecordingReader(str(tmp_path))
    for _ in range(2):
        assert reader.load_step(request(1)).batch.is_identical(make_batch(seed=1))


def test_writing_into_a_loaded_tensor_does_not_reach_the_disk(tmp_path: Path) -> None:
    record(tmp_path)
    reader = RecordingReader(str(tmp_path))
    reader.load_step(request(0)).batch.tokens.zero_()
    assert RecordingReader(str(tmp_path)).load_step(request(0)).batch.is_identical(make_batch(seed=0))


def test_an_existing_step_is_never_overwritten(tmp_path: Path) -> None:
    writer = record(tmp_path)
    path = step_path(str(tmp_path), mode="train", scheduler_id="default", step=0)
    before = Path(path).read_bytes()
    with pytest.raises(StepExistsError) as caught:
        writer.write_step(make_batch(seed=9), make_info(0, run_id=writer.run_id))
    assert str(caught.value) == (
        f"[Rollout Mock] Step file exists and is not overwritten: {path} (run id {writer.run_id}). "
        "Set another rollout_mock.dump_dir, or remove the recording if it is not needed."
    )
    assert Path(path).read_bytes() == before
    assert os.listdir(tmp_path / "train") == ["step_000000.safetensors"]


def test_a_second_dump_into_a_folder_is_refused_unless_resumed(tmp_path: Path) -> None:
    writer = record(tmp_path, [0, 1])
    with pytest.raises(RecordingError) as caught:
        record(tmp_path, [2])
    assert str(caught.value) == (
        f"[Rollout Mock] {tmp_path} already holds a recording (run id {writer.run_id}; steps: train 0-1). "
        "Set another rollout_mock.dump_dir, resume the run that recorded it, or remove the folder if it is not needed."
    )
    assert record(tmp_path, [2], resume=True).run_id == writer.run_id
    RecordingReader(str(tmp_path)).check_plan([request(step) for step in range(3)])


def test_resuming_needs_an_equal_contract(tmp_path: Path) -> None:
    record(tmp_path, [0])
    with pytest.raises(ContractError, match="sequence_length: recorded 64, current 65"):
        open_recording(str(tmp_path), contract=make_contract(sequence_length=65), plan=(), provenance={}, resume=True)


def test_a_resumed_dump_keeps_a_step_that_it_plays_again_alike_and_refuses_another(tmp_path: Path) -> None:
    """A run that stops after a validation plays that validation again when it is resumed."""
    record(tmp_path, [0])
    path = tmp_path / "train" / "step_000000.safetensors"
    before = path.read_bytes()
    writer = open_recording(str(tmp_path), contract=make_contract(), plan=[request(0)], provenance={}, resume=True)
    again = writer.write_step(make_batch(seed=0), make_info(0, run_id=writer.run_id))
    assert (again.was_present, path.read_bytes()) == (True, before)
    with pytest.raises(StepExistsError, match=r"step_000000.safetensors"):
        writer.write_step(make_batch(seed=1), make_info(0, run_id=writer.run_id))
    assert path.read_bytes() == before


def test_steps_without_a_manifest_are_not_continued(tmp_path: Path) -> None:
    record(tmp_path)
    os.unlink(tmp_path / "recording.json")
    with pytest.raises(RecordingError, match=r"holds steps \(train 0\) but no recording.json"):
        record(tmp_path, [1])


def test_a_missing_step_lists_causes_and_the_steps_present(tmp_path: Path) -> None:
    record(tmp_path, range(5))
    record(tmp_path, [0, 5], mode="val", resume=True)
    with pytest.raises(StepNotFoundError) as caught:
        RecordingReader(str(tmp_path)).load_step(request(5))
    assert str(caught.value) == (
        f"[Rollout Mock] Mock file not found: {tmp_path}/train/step_000005.safetensors\n"
        "Possible reasons:\n"
        "  1. Step 5 was not run in dump mode\n"
        f"  2. dump_dir configuration is incorrect: {tmp_path}\n"
        "  3. mode mismatch (current: train)\n"
        "Steps present: train 0-4; val 0, 5\n"
        "Please run in dump mode first to ensure all step data is generated."
    )
    assert isinstance(caught.value, FileNotFoundError)


def test_all_steps_that_a_plan_misses_are_reported_at_once(tmp_path: Path) -> None:
    record(tmp_path, [0])
    plan = [request(0), request(1), request(2), request(4), request(0, mode="val")]
    with pytest.raises(StepNotFoundError) as caught:
        RecordingReader(str(tmp_path)).check_plan(plan)
    assert str(caught.value) == (
        f"[Rollout Mock] Mock file not found: {tmp_path}/train/step_000001.safetensors (and 3 more)\n"
        "Possible reasons:\n"
        "  1. Steps train 1-2, 4; val 0 were not run in dump mode\n"
        f"  2. dump_dir configuration is incorrect: {tmp_path}\n"
        "  3. mode mismatch (current: train, val)\n"
        "Steps present: train 0\n"
        "Please run in dump mode first to ensure all step data is generated."
    )


@pytest.mark.parametrize("ask", ["load_step", "check_plan"])
def test_a_renamed_step_is_refused(tmp_path: Path, ask: str) -> None:
    record(tmp_path, [0])
    os.rename(tmp_path / "train/step_000000.safetensors", tmp_path / "train/step_000001.safetensors")
    reader = RecordingReader(str(tmp_path))
    with pytest.raises(RecordingError) as caught:
        reader.load_step(request(1)) if ask == "load_step" else reader.check_plan([request(1)])
    assert str(caught.value) == (
        f"[Rollout Mock] {tmp_path}/train/step_000001.safetensors holds another step than its name says: "
        "step 0 instead of 1. It was renamed, moved or copied from another recording: restore it or record again."
    )


def test_a_train_file_in_val_is_refused(tmp_path: Path) -> None:
    record(tmp_path, [0])
    shutil.copytree(tmp_path / "train", tmp_path / "val")
    with pytest.raises(RecordingError, match="mode 'train' instead of 'val'"):
        RecordingReader(str(tmp_path)).load_step(request(0, mode="val"))


def test_a_step_of_another_recording_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "a")
    record(tmp_path / "b", [1])
    shutil.rmtree(tmp_path / "b/train")
    shutil.copytree(tmp_path / "a/train", tmp_path / "b/train")
    with pytest.raises(RecordingError, match=r"run_id '.*' instead of '.*'"):
        RecordingReader(str(tmp_path / "b")).check_plan([request(0)])


def test_a_run_that_fails_before_its_first_step_leaves_no_recording(tmp_path: Path) -> None:
    record(tmp_path, [])
    assert os.listdir(tmp_path) == []
    record(tmp_path, [0])


def test_the_second_of_two_runs_that_start_at_once_is_refused(tmp_path: Path) -> None:
    second = record(tmp_path, [])
    record(tmp_path, [0])
    with pytest.raises(RecordingError, match=r"recording.json exists: another run is recording here"):
        second.write_step(make_batch(), make_info(1))
    assert RecordingReader(str(tmp_path)).steps() == {"train": [0]}


def test_a_folder_that_cannot_be_written_is_refused_before_any_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError) as caught:
        record(tmp_path / "file" / "x", [])
    assert str(caught.value) == (
        f"cannot record in {tmp_path}/file/x: {tmp_path}/file is not a folder. Check its permissions, or set another "
        "rollout_mock.dump_dir."
    )


def test_another_batch_size_is_refused(tmp_path: Path) -> None:
    record(tmp_path)
    with pytest.raises(RecordingError) as caught:
        RecordingReader(str(tmp_path)).load_step(request(0, batch_size=8))
    assert str(caught.value) == (
        f"[Rollout Mock] {tmp_path}/train/step_000000.safetensors holds 4 trajectories; the run asks for 8. "
        "Use the batch size of the recording, or record again."
    )


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file_is_found_by_the_plan_and_by_the_load(tmp_path: Path, size: int) -> None:
    record(tmp_path)
    path = tmp_path / "train/step_000000.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    reader = RecordingReader(str(tmp_path))
    with pytest.raises(CorruptRecordingError, match="truncated"):
        reader.check_plan([request(0)])
    with pytest.raises(CorruptRecordingError, match="truncated"):
        reader.load_step(request(0))


def test_one_flipped_bit_is_found_by_a_plan_that_verifies(tmp_path: Path) -> None:
    """A bit in a tensor was found only at the load of its step, after all training before it."""
    record(tmp_path, [0, 1])
    path = tmp_path / "train/step_000001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reader = RecordingReader(str(tmp_path))
    plan = [request(0), request(1)]
    assert reader.check_plan(plan) == 0  # headers only
    assert reader.check_plan([request(0)], verify=True) == (tmp_path / "train/step_000000.safetensors").stat().st_size
    with pytest.raises(CorruptRecordingError) as caught:
        reader.check_plan(plan, verify=True)
    assert str(caught.value) == (
        f"{path}: tensor 'terminations' does not match its digest: the file was changed after it was written. "
        "Restore it from a copy or record the step again."
    )


def test_another_batch_size_is_found_by_a_plan_that_verifies(tmp_path: Path) -> None:
    record(tmp_path)
    with pytest.raises(RecordingError, match=r"holds 4 trajectories; the run asks for 8\."):
        RecordingReader(str(tmp_path)).check_plan([request(0, batch_size=8)], verify=True)


def test_what_a_plan_verified_is_verified_again_when_it_is_loaded(tmp_path: Path) -> None:
    record(tmp_path)
    path = tmp_path / "train/step_000000.safetensors"
    reader = RecordingReader(str(tmp_path))
    reader.check_plan([request(0)], verify=True)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptRecordingError, match="does not match its digest"):
        reader.load_step(request(0))


def test_a_link_out_of_the_recording_is_not_followed(tmp_path: Path) -> None:
    record(tmp_path / "a")
    shutil.move(tmp_path / "a/train", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / "a/train")
    reader = RecordingReader(str(tmp_path / "a"))
    with pytest.raises(RecordingError, match="outside the recording: it is not followed"):
        reader.load_step(request(0))


@pytest.mark.parametrize("scheduler_id", ["../x", "", ".hidden", "a/b", "a" * 65, "a\n"])
def test_a_scheduler_id_that_is_no_safe_folder_name_is_refused(scheduler_id: str) -> None:
    with pytest.raises(RecordingError, match="cannot name a folder"):
        step_path("d", mode="train", scheduler_id=scheduler_id, step=0)


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = record(tmp_path)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(paths.os, "fsync", fail)
    with pytest.raises(
        RecordingError, match=r"cannot write .*step_000001.*: No space left on device\. Nothing partial"
    ):
        writer.write_step(make_batch(), make_info(1))
    assert os.listdir(tmp_path / "train") == ["step_000000.safetensors"]


def test_a_file_system_without_hard_links_still_never_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(paths.os, "link", refuse)
    path = str(tmp_path / "sub" / "file")
    publish_file(path, b"first")
    with pytest.raises(FileExistsError):
        publish_file(path, b"second")
    assert Path(path).read_bytes() == b"first"
    assert os.listdir(tmp_path / "sub") == ["file"]


def test_leftovers_of_a_crash_are_not_read(tmp_path: Path) -> None:
    record(tmp_path)
    (tmp_path / "train/.step_000001.safetensors.1.ab.tmp").write_bytes(b"half")
    assert RecordingReader(str(tmp_path)).steps() == {"train": [0]}


def test_steps_are_shown_as_ranges() -> None:
    assert format_steps([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert format_present({"train": [0, 1], "val": [3]}) == "train 0-1; val 3"
    assert format_present({}) == "none"
