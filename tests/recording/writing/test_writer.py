"""Recording a run: opening, joining, resuming, what is never overwritten, and the steps beside the training loop."""

import os
import socket
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.columns import Ragged
from mock_scheduler.errors import ContractError, CorruptRecordingError, RecordingError, StepExistsError
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.storage.local import LocalStorage
from mock_scheduler.recording.writing.opening import WriterOptions, WrittenStep
from tests.recording.builders import SAMPLING, make_batch, make_contract, make_info, make_rows
from tests.recording.processes import run_in_child
from tests.recording.recordings import files_of, loaded, open_writer, plan, record, request, write

# Python 3.12 warns of a fork beside threads, of which torch and earlier tests may have left some: ours need none.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

IN_PLACE = WriterOptions(background=False)


# ------------------------------------------------------------------------------------------------- layout and existing


def test_a_recording_has_the_documented_layout_and_nothing_else(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, plan=plan(0, 12))
    written = write(writer, [0, 12])
    write(writer, [3], mode="val", scheduler_id="math")
    writer.close()
    assert list(files_of(tmp_path)) == [
        "recording.json",
        "train/step_000000.safetensors",
        "train/step_000012.safetensors",
        "val.math/step_000003.safetensors",
    ]
    path = tmp_path / "train/step_000012.safetensors"
    assert written[1] == WrittenStep(
        step=12,
        mode="train",
        scheduler_id="default",
        path=str(path),
        num_rows=4,
        size_bytes=path.stat().st_size,
    )


@pytest.mark.parametrize("location", ["file://{}", "memory://{}"])
def test_a_url_is_recorded_into_and_read_back(tmp_path: Path, location: str) -> None:
    dump_dir = location.format(tmp_path)
    record(dump_dir, [0, 1])
    assert RecordingReader(dump_dir).steps() == {"train": [0, 1]}
    assert loaded(dump_dir, 1).is_identical(make_batch(seed=1))
    with pytest.raises(RecordingError, match="already holds a recording"):
        open_writer(dump_dir)


def test_a_run_that_fails_before_its_first_step_leaves_no_recording(tmp_path: Path) -> None:
    open_writer(tmp_path / "rec", plan=plan(0)).close()
    assert os.listdir(tmp_path / "rec") == []
    record(tmp_path / "rec")


def test_an_existing_step_is_never_overwritten(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    write(writer)
    before = files_of(tmp_path)
    with pytest.raises(StepExistsError) as caught:
        writer.write_step(make_batch(seed=9), make_info(0, run_id=writer.run_id))
    assert str(caught.value) == (
        f"[Rollout Mock] Step file exists and is not overwritten: {tmp_path}/train/step_000000.safetensors "
        f"(run id {writer.run_id}). Set another rollout_mock.dump_dir, or remove the recording if it is not needed."
    )
    assert files_of(tmp_path) == before


def test_all_planned_steps_that_exist_are_counted_before_any_rollout(tmp_path: Path) -> None:
    writer = record(tmp_path, [0, 1, 2])
    with pytest.raises(StepExistsError) as caught:
        open_writer(tmp_path, plan=plan(1, 2, 3), run_id=writer.run_id)
    assert str(caught.value) == (
        f"[Rollout Mock] Step file exists and is not overwritten: {tmp_path}/train/step_000001.safetensors "
        f"(and 1 more) (run id {writer.run_id}). "
        "Set another rollout_mock.dump_dir, or remove the recording if it is not needed."
    )


def test_a_second_dump_into_a_folder_is_refused_unless_resumed(tmp_path: Path) -> None:
    writer = record(tmp_path, [0, 1])
    with pytest.raises(RecordingError) as caught:
        open_writer(tmp_path)
    assert str(caught.value) == (
        f"[Rollout Mock] {tmp_path} already holds a recording (run id {writer.run_id}; steps: train 0-1). "
        "Set another rollout_mock.dump_dir, resume the run that recorded it, give all schedulers or ranks of one run "
        "one run_id (build_scheduler(run_id=...)), or remove the folder if it is not needed."
    )
    assert record(tmp_path, [2], resume=True).run_id == writer.run_id
    assert RecordingReader(str(tmp_path)).check_plan(plan(0, 1, 2)) > 0


def test_steps_without_a_manifest_are_not_continued(tmp_path: Path) -> None:
    record(tmp_path)
    os.unlink(tmp_path / "recording.json")
    with pytest.raises(RecordingError) as caught:
        open_writer(tmp_path, resume=True)
    assert str(caught.value) == (
        f"[Rollout Mock] {tmp_path} holds steps (train 0) but no recording.json, so their run is not known. Set "
        "another rollout_mock.dump_dir, or remove the folder if the steps are not needed."
    )


# --------------------------------------------------------------------------------------------------------- run, resume


def test_schedulers_of_one_run_share_a_recording(tmp_path: Path) -> None:
    first, second = (open_writer(tmp_path, run_id="run-7") for _ in range(2))
    write(first, [0])
    write(second, [0], scheduler_id="math")
    third = open_writer(tmp_path, run_id="run-7", plan=[request(0, mode="val")])
    write(third, [0], mode="val")
    reader = RecordingReader(str(tmp_path))
    assert reader.steps() == {"train": [0], "train.math": [0], "val": [0]}
    assert reader.manifest.run_id == "run-7"


def test_another_run_is_refused_when_it_opens_and_where_there_are_no_locks_when_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "claim", lambda storage, run_id: None)
    late = open_writer(tmp_path, run_id="run-2")
    record(tmp_path, run_id="run-1")
    text = (
        f"[Rollout Mock] {tmp_path} holds the recording of run id run-1; this run is run-2. Schedulers or ranks of one "
        "run must be given one run_id (build_scheduler(run_id=...)); else set another rollout_mock.dump_dir, or remove "
        "the folder if it is not needed."
    )
    with pytest.raises(RecordingError) as caught:
        open_writer(tmp_path, run_id="run-2", resume=True)
    assert str(caught.value) == text
    with pytest.raises(RecordingError) as caught:
        write(late, [1])
    assert str(caught.value) == text
    assert RecordingReader(str(tmp_path)).steps() == {"train": [0]}


def test_a_second_run_is_refused_before_either_has_written_anything(tmp_path: Path) -> None:
    """The manifest came with the first step: the second run played a whole batch before it was refused."""
    first = open_writer(tmp_path, run_id="run-1")
    own = open_writer(tmp_path, run_id="run-1")  # another scheduler of the run
    child = (
        f"RecordingError: [Rollout Mock] {tmp_path} is being written by another run (run id run-1, process "
        f"{os.getpid()} on {socket.gethostname()}); this one is run id run-2: two runs cannot record into one folder. "
        "Schedulers or ranks of one run must be given one run_id (build_scheduler(run_id=...)); else wait for the "
        "other run to end, or set another rollout_mock.dump_dir."
    )
    for writer in (first, own):
        assert run_in_child(lambda: open_writer(tmp_path, run_id="run-2")) == child
        with pytest.raises(RecordingError, match=r"this very process .* whose earlier writer was not closed"):
            open_writer(tmp_path, run_id="run-2", resume=True)
        writer.close()
    assert os.listdir(tmp_path) == []
    assert record(tmp_path, run_id="run-2").run_id == "run-2"
    assert sorted(os.listdir(tmp_path)) == ["recording.json", "train"]


def test_a_claim_that_a_killed_process_left_means_nothing(tmp_path: Path) -> None:
    (tmp_path / ".run").write_text("run-1\nprocess 1 on elsewhere")
    writer = open_writer(tmp_path, run_id="run-2")
    assert (tmp_path / ".run").read_text() == f"run-2\nprocess {os.getpid()} on {socket.gethostname()}"
    writer.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("is_early", [True, False])
def test_one_run_with_two_contracts_is_refused(tmp_path: Path, is_early: bool) -> None:
    if is_early:
        other = open_writer(tmp_path, run_id="run-1", contract=make_contract(sequence_length=65))
        record(tmp_path, run_id="run-1")
        with pytest.raises(ContractError, match="sequence_length: recorded 64, current 65"):
            write(other, [1])
    else:
        record(tmp_path, run_id="run-1")
        with pytest.raises(ContractError, match="sequence_length: recorded 64, current 65"):
            open_writer(tmp_path, run_id="run-1", contract=make_contract(sequence_length=65))


def test_resuming_needs_an_equal_contract(tmp_path: Path) -> None:
    record(tmp_path)
    with pytest.raises(ContractError, match="sequence_length: recorded 64, current 65") as caught:
        open_writer(tmp_path, resume=True, contract=make_contract(sequence_length=65))
    assert str(caught.value).endswith(
        "\nA run that adds steps to a recording must have its contract: rollout_mock.on_mismatch=warn does not apply "
        "there. Set another rollout_mock.dump_dir to record a recording of this run's own."
    )


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_resumed_dump_keeps_a_step_that_it_plays_again_alike_and_refuses_another(
    tmp_path: Path, compression: str
) -> None:
    """A run that stops after a validation plays that validation again when it is resumed; compressed or not."""
    record(tmp_path, [0])
    before = files_of(tmp_path)
    writer = open_writer(tmp_path, resume=True, plan=plan(0), options=WriterOptions(compression=compression))
    [again] = write(writer, [0])
    path = f"{tmp_path}/train/step_000000.safetensors"
    assert (again.was_present, again.path, again.size_bytes) == (True, path, os.path.getsize(path))
    with pytest.raises(StepExistsError):
        writer.write_step(make_batch(seed=1), make_info(0, run_id=writer.run_id))
    writer.close()
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("policy_version", 9, "policy_version: recorded 0, played 9"),
        ("data_cursor", {"at": 100}, 'data_cursor: recorded null, played {"at":100}'),
        ("scheduler_state", {"rng": [2]}, 'scheduler_state: recorded {}, played {"rng":[2]}'),
        ("group_size", 2, "group_size: recorded null, played 2"),
    ],
)
def test_a_resumed_dump_refuses_a_step_that_was_played_from_elsewhere(
    tmp_path: Path, name: str, value: object, text: str
) -> None:
    """Only the batch was compared: the recording kept the cursor and state of the run before, of which it then spoke as
    of those of the run that goes on."""
    record(tmp_path, [0])
    before = files_of(tmp_path)
    writer = open_writer(tmp_path, resume=True, plan=plan(0))
    with pytest.raises(StepExistsError) as caught:
        write(writer, [0], **{name: value})
    assert str(caught.value) == (
        f"[Rollout Mock] Step file exists and is not overwritten: {tmp_path}/train/step_000000.safetensors "
        f"(run id {writer.run_id}). Set another rollout_mock.dump_dir, or remove the recording if it is not needed.\n"
        f"{text}"
    )
    assert write(writer, [0], metrics={"time/rollout_s": 99.0})[0].was_present  # a time is never the same twice
    writer.close()
    assert files_of(tmp_path) == before


def test_a_resumed_dump_finds_a_step_that_was_damaged(tmp_path: Path) -> None:
    record(tmp_path, [0])
    path = tmp_path / "train/step_000000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptRecordingError, match="does not match"):
        record(tmp_path, [0], resume=True)


# --------------------------------------------------------------------------------------------------------------- locks


def test_a_second_process_is_refused_while_the_first_writes(tmp_path: Path) -> None:
    first = open_writer(tmp_path, run_id="run-1", plan=plan(0))
    refusal = (
        f"RecordingError: [Rollout Mock] {tmp_path}/train is being written by process {os.getpid()} on "
        f"{os.uname().nodename}: two runs cannot record into one folder. Wait for the other run to end, or set another "
        "rollout_mock.dump_dir."
    )
    assert run_in_child(lambda: open_writer(tmp_path, run_id="run-1", plan=plan(1))) == refusal
    assert run_in_child(lambda: record(tmp_path, [1], run_id="run-1")) == refusal
    assert run_in_child(lambda: write(first, [0])) == refusal  # the forked child has no part in the lock
    write(first, [0])
    assert run_in_child(lambda: write(open_writer(tmp_path, run_id="run-1"), [0], mode="val")) == "done"
    first.close()
    assert run_in_child(lambda: record(tmp_path, [1], run_id="run-1")) == "done"
    assert RecordingReader(str(tmp_path)).steps() == {"train": [0, 1], "val": [0]}


def test_a_refused_opening_holds_nothing(tmp_path: Path) -> None:
    holder = open_writer(tmp_path, run_id="run-1", plan=[request(0, mode="val")])
    with pytest.raises(RecordingError, match="is being written"):
        open_writer(tmp_path, run_id="run-1", plan=[request(0), request(0, mode="val")])
    assert run_in_child(lambda: record(tmp_path, [0], run_id="run-1")) == "done"
    holder.close()


# ---------------------------------------------------------------------------------------------------------- background


def make_rich_batch() -> RolloutBatch:
    """A batch with everything that can be changed from outside."""
    rows = [
        replace(
            row,
            extras={
                "dense": torch.full((2,), float(i)),
                "ragged": Ragged(torch.arange(i)),
                "chat": [{"role": "user", "text": f"{i}"}],
            },
        )
        for i, row in enumerate(make_rows(2, 2))
    ]
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=2, meta={"prompt": {"ids": [1, 2]}})


def test_a_step_is_recorded_as_it_was_when_it_was_given(tmp_path: Path) -> None:
    writer, may_write = open_writer(tmp_path), threading.Event()
    writer.on_written = lambda _written: may_write.wait(60)
    writer.submit(make_batch(), make_info(0, run_id=writer.run_id))  # keeps the thread busy
    batch, state, metrics = make_rich_batch(), {"seeds": [1]}, {"time/rollout_s": 1.0}
    expected = make_rich_batch()
    info = make_info(1, run_id=writer.run_id, scheduler_state=state, metrics=metrics, data_cursor={"epoch": [0]})
    writer.submit(batch, info)
    for tensor in batch.tensors().values():
        tensor.zero_()
    batch.extras["dense"].values.zero_()
    batch.extras["ragged"].values.zero_()
    batch.extras["ragged"].offsets.zero_()
    batch.extras["chat"].items[0][0]["text"] = "changed"
    batch.meta["prompt"]["ids"].append(3)
    state["seeds"].append(2)
    metrics["time/rollout_s"] = 2.0
    info.data_cursor["epoch"].append(1)
    may_write.set()
    writer.close()
    step = RecordingReader(str(tmp_path)).load_step(request(1))
    assert step.batch.is_identical(expected)
    assert (step.info.scheduler_state, step.info.metrics) == ({"seeds": [1]}, {"time/rollout_s": 1.0})
    assert step.info.data_cursor == {"epoch": [0]}


def test_steps_given_in_the_background_are_told_of_when_they_are_on_disk(tmp_path: Path) -> None:
    writer, told = open_writer(tmp_path), []

    def note(written: WrittenStep) -> None:
        told.append((written.step, os.path.getsize(written.path) == written.size_bytes, threading.current_thread()))

    writer.on_written = note
    for step in range(5):
        writer.submit(make_batch(seed=step), make_info(step, run_id=writer.run_id))
    writer.flush()
    assert [(step, is_there) for step, is_there, _ in told] == [(step, True) for step in range(5)]
    assert threading.main_thread() not in {thread for *_, thread in told}
    assert [loaded(tmp_path, step).is_identical(make_batch(seed=step)) for step in range(5)] == [True] * 5
    writer.close()


def test_without_a_background_a_step_is_on_disk_when_it_was_given(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, options=IN_PLACE)
    writer.submit(make_batch(), make_info(0, run_id=writer.run_id))
    assert loaded(tmp_path, 0).is_identical(make_batch())


@pytest.mark.parametrize("options", [WriterOptions(), IN_PLACE], ids=["background", "in place"])
def test_a_failed_write_ends_the_recording_and_is_told_of_by_every_later_call(
    tmp_path: Path, options: WriterOptions
) -> None:
    """Raised once, the error was forgotten: the next checkpoint claimed a step that is not on disk."""
    record(tmp_path, [1], run_id="run-1")
    writer = open_writer(tmp_path, run_id="run-1", options=options)

    def give_all() -> None:
        for step in range(4):
            writer.submit(make_batch(seed=9), make_info(step, run_id=writer.run_id))
        writer.flush()

    with pytest.raises(StepExistsError, match=r"step_000001.safetensors"):
        give_all()
    for call in (writer.submit, writer.write_step):
        with pytest.raises(RecordingError, match=r"Nothing more is recorded.*step_000001.safetensors"):
            call(make_batch(), make_info(7, run_id=writer.run_id))
    for later in (writer.flush, partial(writer.checkpoint_saved, 2), writer.close, writer.close):
        with pytest.raises(RecordingError, match=r"Nothing more is recorded.*step_000001.safetensors"):
            later()
    assert RecordingReader(str(tmp_path)).steps() == {"train": [0, 1]}


def test_close_raises_what_no_other_call_did_and_gives_the_lock_back(tmp_path: Path) -> None:
    record(tmp_path, [0], run_id="run-1")
    writer = open_writer(tmp_path, run_id="run-1")
    writer.submit(make_batch(seed=9), make_info(0, run_id=writer.run_id))
    with pytest.raises(StepExistsError):
        writer.close()
    with pytest.raises(RecordingError, match="Nothing more is recorded"):
        writer.close()
    record(tmp_path, [1], resume=True)


def test_compressed_steps_are_smaller_and_read_back(tmp_path: Path) -> None:
    rows = make_rows(8, 2)
    batch = RolloutBatch.from_trajectories(
        [replace(row, extras={"zeros": torch.zeros(1000)}) for row in rows], sampling=SAMPLING, group_size=2
    )
    sizes = {}
    for compression in ("none", "zstd"):
        writer = open_writer(tmp_path / compression, options=WriterOptions(compression=compression))
        sizes[compression] = writer.write_step(batch, make_info(0, run_id=writer.run_id)).size_bytes
        writer.close()
        assert loaded(tmp_path / compression, 0, batch_size=16).is_identical(batch)
    assert os.listdir(tmp_path / "zstd" / "train") == ["step_000000.safetensors.zst"]
    assert 5 * sizes["zstd"] < sizes["none"]
