"""Steps that several writers record together: committed when whole, never a mixture."""

import os
from pathlib import Path

import pytest

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import RecordingError, StepExistsError
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.writing.opening import RecordingWriter, WriterOptions
from mock_scheduler.recording.writing.sharded import Patience
from mock_scheduler.scheduler import RowShard
from tests.recording.builders import make_batch, make_info
from tests.recording.recordings import files_of, loaded, open_writer, plan, request


class FakeTime:
    """A clock that moves only while someone sleeps, and does something at every sleep."""

    def __init__(self, at_sleep: list[object] | None = None) -> None:
        self.now_s, self.at_sleep = 100.0, at_sleep or []

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.at_sleep:
            self.at_sleep.pop(0)()

    def patience(self, timeout_s: float = 600.0) -> Patience:
        return Patience(timeout_s=timeout_s, clock=lambda: self.now_s, sleep=self.sleep)


def shard_options(index: int, *, count: int = 2, time: FakeTime | None = None, **changes: object) -> WriterOptions:
    patience = (time or FakeTime()).patience()
    return WriterOptions(
        **{"shard": RowShard(index=index, count=count), "patience": patience, "background": False, **changes}
    )


def shard_of(batch: RolloutBatch, index: int, count: int = 2) -> RolloutBatch:
    size = len(batch) // count
    return batch.select(range(index * size, (index + 1) * size))


def submit_shard(writer: RecordingWriter, index: int, step: int = 0, *, seed: int | None = None) -> None:
    batch = make_batch(seed=step if seed is None else seed)
    writer.submit(shard_of(batch, index), make_info(step, run_id=writer.run_id))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_shards_of_a_step_are_committed_when_all_are_there(tmp_path: Path, compression: str) -> None:
    second = open_writer(tmp_path, run_id="r", plan=plan(0), options=shard_options(1, compression=compression))
    time = FakeTime([lambda: None, lambda: submit_shard(second, 1)])
    first = open_writer(
        tmp_path, run_id="r", plan=plan(0), options=shard_options(0, time=time, compression=compression)
    )
    submit_shard(first, 0)
    first.close()
    second.close()
    ending = ".zst" if compression == "zstd" else ""
    assert list(files_of(tmp_path)) == [
        "recording.json",
        "train/step_000000/commit.json",
        f"train/step_000000/shard_00000-of-00002.safetensors{ending}",
        f"train/step_000000/shard_00001-of-00002.safetensors{ending}",
    ]
    assert time.now_s == pytest.approx(100.06)
    assert [row.identity for row in loaded(tmp_path, 0).rows()] == [row.identity for row in make_batch().rows()]
    part = RecordingReader(str(tmp_path)).load_step(request(0), shard=RowShard(index=1, count=2)).batch
    assert part.is_identical(shard_of(make_batch(), 1))


def test_a_step_whose_shards_do_not_come_is_not_there_and_they_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writers = [open_writer(tmp_path, run_id="r", options=shard_options(i, count=4)) for i in range(4)]
    writers[2].submit(shard_of(make_batch(), 2, 4), make_info(0, run_id="r"))
    with pytest.raises(RecordingError) as caught:
        writers[0].submit(shard_of(make_batch(), 0, 4), make_info(0, run_id="r"))
    assert str(caught.value) == (
        f"[Rollout Mock] {tmp_path}/train/step_000000 is not committed: after 600 s 2 of 4 shards are missing: 1, 3. "
        "Their ranks have ended, do not record this step, or write elsewhere: see their logs."
    )
    assert RecordingReader(str(tmp_path)).steps() == {}
    assert len(caplog.messages) == 20  # after 5 s, and then every 30 s of 600
    assert caplog.messages[0] == (
        "[Rollout Mock] Waiting for shards 1, 3 of 4 (counted from 0) of train step 0, for at most 600 s (5 s so far)"
    )


def test_waiting_for_shards_does_not_hold_up_the_training_loop(tmp_path: Path) -> None:
    """The second shard is written by the thread that gives the first: waiting in ``submit`` would never end."""
    second = open_writer(tmp_path, run_id="r", options=shard_options(1))
    first = open_writer(
        tmp_path, run_id="r", options=shard_options(0, background=True, patience=Patience(timeout_s=60))
    )
    submit_shard(first, 0)
    assert not (tmp_path / "train/step_000000/commit.json").exists()
    submit_shard(second, 1)
    first.close()
    assert RecordingReader(str(tmp_path)).steps() == {"train": [0]}


def test_shards_of_a_step_that_was_not_committed_never_mix_with_new_ones(tmp_path: Path) -> None:
    """A run was killed after shard 1 of step 1; resumed, it plays another batch there. Shard 0, which would find the
    old shard 1 beside its new one, must not commit the two."""
    for index in (1, 0):
        writer = open_writer(tmp_path, run_id="r", options=shard_options(index))
        submit_shard(writer, index, 0)
        if index == 1:
            submit_shard(writer, 1, 1)
        writer.close()
    second = open_writer(tmp_path, run_id="r", plan=plan(1), resume=True, options=shard_options(1))
    time = FakeTime([lambda: submit_shard(second, 1, 1, seed=7)])
    first = open_writer(tmp_path, run_id="r", plan=plan(1), resume=True, options=shard_options(0, time=time))
    assert "step_000001" not in os.listdir(tmp_path / "train")
    submit_shard(first, 0, 1, seed=7)
    assert loaded(tmp_path, 0).digest() == RolloutBatch.concat([shard_of(make_batch(), i) for i in (0, 1)]).digest()
    assert loaded(tmp_path, 1).tokens.equal(make_batch(seed=7).tokens)


def test_a_resumed_shard_that_is_committed_stays_and_another_is_refused(tmp_path: Path) -> None:
    for index in (1, 0):
        submit_shard(open_writer(tmp_path, run_id="r", options=shard_options(index)), index)
    before = files_of(tmp_path)
    again = open_writer(tmp_path, run_id="r", resume=True, plan=plan(0), options=shard_options(1))
    assert again.write_step(shard_of(make_batch(), 1), make_info(0, run_id="r")).was_present
    with pytest.raises(StepExistsError):
        again.write_step(shard_of(make_batch(seed=5), 1), make_info(0, run_id="r"))
    again.close()
    whole = open_writer(tmp_path, run_id="r", resume=True, plan=plan(0))
    with pytest.raises(StepExistsError) as caught:
        whole.write_step(make_batch(), make_info(0, run_id="r"))
    assert str(caught.value) == (
        f"[Rollout Mock] Step file exists and is not overwritten: {tmp_path}/train/step_000000 (run id r). "
        "Set another rollout_mock.dump_dir, or remove the recording if it is not needed."
    )
    whole.close()
    assert files_of(tmp_path) == before


def test_shards_are_locked_one_by_one(tmp_path: Path) -> None:
    first = open_writer(tmp_path, run_id="r", plan=plan(0), options=shard_options(0))
    second = open_writer(tmp_path, run_id="r", plan=plan(0), options=shard_options(1))
    for options in (shard_options(1), WriterOptions()):
        with pytest.raises(RecordingError, match="is being written by this very process"):
            open_writer(tmp_path, run_id="r", plan=plan(0), options=options)
    first.close()
    second.close()
    assert os.listdir(tmp_path) == []
