"""Reading a recording: the step that was asked for, whole and verified, or an error that says what is wrong."""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mock_scheduler.recording.reading.reader
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import CorruptRecordingError, RecordingError, StepNotFoundError
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.retention import RetentionRecord, save_retention
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.recording.storage.local import LocalStorage
from mock_scheduler.scheduler import RowShard
from tests.recording.builders import SAMPLING, make_batch, make_row
from tests.recording.step_recordings import cut, record, record_shards, request

STEP_0, STEP_1 = "train/step_000000.safetensors", "train/step_000001.safetensors"


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_loaded_step_is_the_written_one(tmp_path: Path, compression: str) -> None:
    record(tmp_path, [0, 1], compression=compression)
    reader = RecordingReader(str(tmp_path))
    assert reader.steps() == {"train": [0, 1]}
    for _ in range(2):
        step = reader.load_step(request(1))
        assert step.batch.is_identical(make_batch(seed=1))
        assert step.path == f"{tmp_path}/{STEP_1}{'.zst' if compression == 'zstd' else ''}"
        assert (step.info.step, step.info.run_id) == (1, reader.manifest.run_id)


def test_an_open_step_tells_its_size_from_its_header(tmp_path: Path) -> None:
    record(tmp_path)
    step = RecordingReader(str(tmp_path)).open_step(request(batch_size=1))
    assert (step.num_rows, step.num_trajectories, step.info.step) == (4, 4, 0)
    assert step.path == f"{tmp_path}/{STEP_0}"
    assert step.load().is_identical(make_batch(seed=0))


def test_a_reader_knows_which_steps_it_has(tmp_path: Path) -> None:
    record(tmp_path, [3])
    reader = RecordingReader(str(tmp_path))
    assert [reader.has_step(request(step)) for step in (2, 3)] == [False, True]
    assert not reader.has_step(request(3, mode="val"))


def test_a_remote_recording_is_read(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    record(tmp_path, [0, 1])
    location = "memory://test-reader/recording"
    fsspec.filesystem("memory").put(str(tmp_path), "/test-reader/recording", recursive=True)
    reader = RecordingReader(location)
    assert reader.check_plan([request(0), request(1)], verify=True) > 0
    assert reader.load_step(request(1), shard=RowShard(index=1, count=2)).batch.num_trajectories == 2
    with pytest.raises(StepNotFoundError, match="Recordings nearby: not looked for at a remote location"):
        RecordingReader("memory://test-reader/nothing")


def test_writing_into_a_loaded_tensor_does_not_reach_the_disk(tmp_path: Path) -> None:
    record(tmp_path)
    before = (tmp_path / STEP_0).read_bytes()
    reader = RecordingReader(str(tmp_path))
    reader.load_step(request()).batch.tokens.zero_()
    assert reader.load_step(request()).batch.is_identical(make_batch(seed=0))
    assert (tmp_path / STEP_0).read_bytes() == before


@pytest.mark.parametrize("count", [1, 2, 4])
def test_shards_of_one_file_are_equal_parts_in_identity_order(tmp_path: Path, count: int) -> None:
    record(tmp_path)
    reader, batch = RecordingReader(str(tmp_path)), make_batch(seed=0)
    size = 4 // count
    for index in range(count):
        part = reader.load_step(request(), shard=RowShard(index=index, count=count)).batch
        assert part.identities == batch.identities[index * size : (index + 1) * size]
        assert part.group_size == (None if count == 4 else 2)


def test_trajectories_that_cannot_be_shared_equally_are_refused(tmp_path: Path) -> None:
    record(tmp_path)
    with pytest.raises(RecordingError) as caught:
        RecordingReader(str(tmp_path)).load_step(request(), shard=RowShard(index=0, count=3))
    assert str(caught.value) == (
        f"[Rollout Mock] {tmp_path}/{STEP_0} holds 4 trajectories, which 3 processes cannot share equally. "
        "Use a number of processes that divides it, or record again."
    )


def test_a_missing_step_lists_causes_and_the_steps_present(tmp_path: Path) -> None:
    record(tmp_path, range(5))
    record(tmp_path, [0, 5], mode="val")
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


def test_steps_that_retention_removed_are_told_from_those_never_recorded(tmp_path: Path) -> None:
    record(tmp_path, [5])
    record_of_removed = RetentionRecord(start_points=(0, 4), removed={"train": StepRanges.parse("0-3")})
    save_retention(open_storage(str(tmp_path)), record_of_removed)
    with pytest.raises(StepNotFoundError) as caught:
        RecordingReader(str(tmp_path)).check_plan([request(step) for step in (2, 3, 4, 5)])
    assert "Steps present: train 5\nSteps removed by retention: train 2-3\nPlease run" in str(caught.value)
    with pytest.raises(StepNotFoundError) as caught:
        RecordingReader(str(tmp_path)).load_step(request(4))
    assert "removed by retention" not in str(caught.value)


@pytest.mark.parametrize("ask", ["load_step", "check_plan"])
def test_a_renamed_step_is_refused(tmp_path: Path, ask: str) -> None:
    record(tmp_path, [0])
    os.rename(tmp_path / STEP_0, tmp_path / STEP_1)
    reader = RecordingReader(str(tmp_path))
    with pytest.raises(RecordingError) as caught:
        reader.load_step(request(1)) if ask == "load_step" else reader.check_plan([request(1)])
    assert str(caught.value) == (
        f"[Rollout Mock] {tmp_path}/{STEP_1} holds another step than its name says: "
        "step 0 instead of 1. It was renamed, moved or copied from another recording: restore it or record again."
    )


def test_a_train_file_in_val_is_refused(tmp_path: Path) -> None:
    record(tmp_path, [0])
    shutil.copytree(tmp_path / "train", tmp_path / "val")
    with pytest.raises(RecordingError, match="mode 'train' instead of 'val'"):
        RecordingReader(str(tmp_path)).load_step(request(0, mode="val"))


def test_a_step_of_another_run_is_refused(tmp_path: Path) -> None:
    record(tmp_path, run_id="run-2")
    with pytest.raises(RecordingError, match=r"run_id 'run-2' instead of 'run-1'"):
        RecordingReader(str(tmp_path)).check_plan([request(0)])


@pytest.mark.parametrize("ask", ["load_step", "check_plan"])
def test_another_batch_size_is_refused(tmp_path: Path, ask: str) -> None:
    """A plan without verification found it only when the step was loaded."""
    record(tmp_path)
    reader, other = RecordingReader(str(tmp_path)), request(batch_size=8)
    with pytest.raises(RecordingError) as caught:
        reader.load_step(other) if ask == "load_step" else reader.check_plan([other])
    assert str(caught.value) == (
        f"[Rollout Mock] {tmp_path}/{STEP_0} holds 4 trajectories; the run asks for 8. "
        "Use the batch size of the recording, or record again."
    )


def test_another_data_cursor_is_refused_where_both_have_one(tmp_path: Path) -> None:
    record(tmp_path, [0], data_cursor={"epoch": 0, "index": 128})
    record(tmp_path, [1])
    reader = RecordingReader(str(tmp_path))
    for step, cursor in ((0, {"index": 128, "epoch": 0}), (0, None), (1, {"epoch": 0, "index": 128})):
        reader.load_step(request(step, data_cursor=cursor))
    with pytest.raises(RecordingError) as caught:
        reader.load_step(request(data_cursor={"epoch": 0, "index": 256}))
    assert str(caught.value) == (
        f'[Rollout Mock] {tmp_path}/{STEP_0} was recorded at data cursor {{"epoch":0,"index":128}}; the run is at '
        '{"epoch":0,"index":256}. Start from the checkpoint and data order of the recording, or record again.'
    )


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    record(tmp_path)
    reader, digests = RecordingReader(str(tmp_path)), make_batch(seed=0).prompt_digests
    reader.load_step(request(prompt_digests=digests[::-1]))
    reader.load_step(request(prompt_digests=digests), shard=RowShard(index=1, count=2))
    other = "0" * 64
    for ask in (reader.load_step, lambda request: reader.check_plan([request])):
        with pytest.raises(RecordingError) as caught:
            ask(request(prompt_digests=(*digests[:3], other)))
        assert str(caught.value) == (
            f"[Rollout Mock] {tmp_path}/{STEP_0} holds other prompts than the run asks for: 1 of 4 asked for are not "
            f"recorded (the first: {other}), 1 recorded ones are not asked for. Use the data, their order and the "
            "tokenizer of the recording, or record again."
        )
    with pytest.raises(RecordingError, match="0 of 3 asked for are not recorded, 1 recorded ones are not asked for"):
        reader.load_step(request(prompt_digests=digests[:3]))
    with pytest.raises(RecordingError, match="1 of 4 asked for are not recorded"):  # counted, not only present
        reader.load_step(request(prompt_digests=(digests[0], *digests[:3])))


def test_prompts_may_be_given_once_per_group(tmp_path: Path) -> None:
    """As GRPO asks: every prompt once, to be played by a whole group."""
    rows = [make_row(index // 2, index % 2, tokens=(index // 2, 2, 3, 4)) for index in range(4)]
    batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=2)
    record_shards(tmp_path, [batch])
    reader, digests = RecordingReader(str(tmp_path)), batch.prompt_digests
    reader.load_step(request(prompt_digests=digests))
    reader.load_step(request(prompt_digests=digests[::2]))
    with pytest.raises(RecordingError, match="1 of 2 asked for are not recorded"):
        reader.load_step(request(prompt_digests=(digests[0], "0" * 64)))


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file_is_found_by_the_plan_and_by_the_load(tmp_path: Path, size: int) -> None:
    record(tmp_path)
    path = tmp_path / STEP_0
    path.write_bytes(path.read_bytes()[:size])
    reader = RecordingReader(str(tmp_path))
    with pytest.raises(CorruptRecordingError, match="truncated"):
        reader.check_plan([request(0)])
    with pytest.raises(CorruptRecordingError, match="truncated"):
        reader.load_step(request(0))


def test_one_flipped_bit_is_found_by_a_plan_that_verifies(tmp_path: Path) -> None:
    """A bit in a tensor was found only at the load of its step, after all training before it."""
    record(tmp_path, [0, 1])
    path, size_bytes = tmp_path / STEP_1, (tmp_path / STEP_0).stat().st_size
    flip_last_bit(path)
    reader = RecordingReader(str(tmp_path))
    plan = [request(0), request(1)]
    assert reader.check_plan(plan) < 2 * size_bytes  # headers only
    assert reader.check_plan([request(0)], verify=True) == size_bytes
    with pytest.raises(CorruptRecordingError) as caught:
        reader.check_plan(plan, verify=True)
    assert str(caught.value) == (
        f"{path}: tensor 'terminations' does not match its digest: the file was changed after it was written. "
        "Restore it from a copy or record the step again."
    )


def test_a_plan_for_a_shard_verifies_its_own_rows(tmp_path: Path) -> None:
    parts = [make_batch(seed=0).select(rows) for rows in ([0, 1], [2, 3])]
    name = record_shards(tmp_path, parts)
    flip_last_bit(tmp_path / name / "shard_00001-of-00002.safetensors")
    reader = RecordingReader(str(tmp_path))
    reader.check_plan([request()], verify=True, shard=RowShard(index=0, count=2))
    with pytest.raises(CorruptRecordingError, match=r"shard_00001-of-00002\.safetensors: tensor 'terminations'"):
        reader.check_plan([request()], verify=True, shard=RowShard(index=1, count=2))


def test_what_a_plan_verified_is_verified_again_when_it_is_loaded(tmp_path: Path) -> None:
    record(tmp_path)
    reader = RecordingReader(str(tmp_path))
    reader.check_plan([request(0)], verify=True)
    flip_last_bit(tmp_path / STEP_0)
    with pytest.raises(CorruptRecordingError, match="does not match its digest"):
        reader.load_step(request(0))


def test_a_load_of_one_part_does_not_count_as_verification_of_another(tmp_path: Path) -> None:
    record(tmp_path)
    reader = RecordingReader(str(tmp_path))
    flip_last_bit(tmp_path / STEP_0)
    for index in (0, 1):
        with pytest.raises(CorruptRecordingError, match="'terminations' does not match its digest"):
            reader.load_step(request(), shard=RowShard(index=index, count=2))


def test_a_link_out_of_the_recording_is_not_followed(tmp_path: Path) -> None:
    record(tmp_path / "a")
    shutil.move(tmp_path / "a/train", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / "a/train")
    reader = RecordingReader(str(tmp_path / "a"))
    with pytest.raises(RecordingError, match="outside the recording: it is not followed"):
        reader.load_step(request(0))


def test_a_sharded_step_is_found_among_files(tmp_path: Path) -> None:
    record(tmp_path, [0])
    record_shards(tmp_path, cut(make_batch(seed=1), [0, 1, 0, 1], 2), step=1)
    reader = RecordingReader(str(tmp_path))
    assert reader.steps() == {"train": [0, 1]}
    assert reader.check_plan([request(0), request(1)], verify=True) > 0
    assert reader.load_step(request(1)).batch.identities == make_batch(seed=1).identities


class Asked:
    """Counts what is asked of a folder: names looked for, listings and files opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        for name in ("exists", "list_names", "open_source", "read_bytes"):
            monkeypatch.setattr(LocalStorage, name, self._counted(name, getattr(LocalStorage, name)))

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return method(*arguments, **options)

        return call


@pytest.mark.parametrize("num_steps", [2, 20])
def test_a_rank_that_reads_beside_another_asks_for_names_once_however_long_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    record(tmp_path, range(num_steps))
    asked = Asked(monkeypatch)
    reader = RecordingReader(str(tmp_path))
    assert reader.check_plan([request(step) for step in range(num_steps)], has_headers=False) == 0
    assert asked.calls == {"read_bytes": 1, "list_names": 2}
    for step in range(num_steps):
        assert reader.load_step(request(step)).batch.is_identical(make_batch(seed=step))
    # Each step is opened where the plan found it.
    assert asked.calls == {"read_bytes": 1, "list_names": 2, "open_source": num_steps}


@pytest.mark.parametrize("has_headers", [False, True])
def test_of_a_long_plan_both_ends_of_steps_and_of_stand_ins_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_headers: bool
) -> None:
    monkeypatch.setattr(mock_scheduler.recording.reading.reader, "MOST_CHECKED", 8)
    record(tmp_path, [step for step in range(20) if step not in (5, 15)])
    reader = RecordingReader(str(tmp_path))
    steps, stand_ins = [request(step) for step in range(10)], [request(step) for step in range(10, 20)]
    reader.check_plan(steps, stand_ins=stand_ins, has_headers=has_headers)
    assert reader.check_plan(steps[:1], stand_ins=stand_ins[:1], has_headers=False) == 0
    for absent in (1, 8, 11, 18):
        path = tmp_path / f"train/step_{absent:06d}.safetensors"
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(StepNotFoundError, match=f"step_{absent:06d}"):
            reader.check_plan(steps, stand_ins=stand_ins, has_headers=has_headers)
        path.write_bytes(content)


def test_a_rank_beside_another_lists_all_steps_that_both_ends_of_a_long_plan_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mock_scheduler.recording.reading.reader, "MOST_CHECKED", 4)
    record(tmp_path, range(2, 8))
    plan = [request(step) for step in range(10)]
    with pytest.raises(StepNotFoundError, match=r"train 0-1, 8-9 were not run in dump mode"):
        RecordingReader(str(tmp_path)).check_plan(plan, has_headers=False)


def test_a_planned_step_that_took_another_form_since_is_found(tmp_path: Path) -> None:
    record(tmp_path, (0,))
    reader = RecordingReader(str(tmp_path))
    reader.check_plan([request(0)], has_headers=False)
    path = tmp_path / "train" / "step_000000.safetensors"
    reader.storage.publish("train/step_000000.safetensors.zst", [path.read_bytes()])
    path.unlink()
    assert reader.load_step(request(0)).batch.is_identical(make_batch(seed=0))


def test_a_header_that_a_check_of_names_passed_over_is_checked_by_the_load(tmp_path: Path) -> None:
    record(tmp_path, (0,))
    path = tmp_path / "train" / "step_000000.safetensors"
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    reader = RecordingReader(str(tmp_path))
    reader.check_plan([request(0)], has_headers=False)
    with pytest.raises(CorruptRecordingError, match="step_000000"):
        reader.load_step(request(0))
