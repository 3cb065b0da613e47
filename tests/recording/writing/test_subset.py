"""Recordings cut down to some whole groups: their rows to the bit, a contract of their own, and where they are from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mock_scheduler.batch.trajectory import GroupKey
from mock_scheduler.errors import RecordingError, StepNotFoundError
from mock_scheduler.recording.manifest import collect_provenance
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.writing.subset import RECORDER_KEYS, load_train_step, select_groups, write_subset
from mock_scheduler.scheduler import RolloutRequest
from tests.recording.builders import make_batch, make_contract, make_info
from tests.recording.recordings import open_writer

FIRST, SECOND, THIRD = (("default", group, 0) for group in range(3))


def record(folder: Path, *, num_steps: int = 2) -> RecordingReader:
    """Steps of three groups of two, with what a real scheduler says of a whole batch."""
    provenance = {"vocabulary": ["a", "b"], "settings": {"NCCL_ALGO": "Ring"}}
    writer = open_writer(folder, contract=make_contract(batch=6), provenance=provenance)
    for step in range(num_steps):
        info = make_info(step, run_id=writer.run_id, policy_version=step, data_cursor={"first_episode": step})
        writer.write_step(make_batch(3, 2, seed=step), replace(info, scheduler_state={"seen": step}))
    writer.close()
    return RecordingReader(str(folder))


def test_the_rows_of_the_chosen_groups_are_kept_to_the_bit(tmp_path: Path) -> None:
    reader = record(tmp_path / "a")
    size_bytes = write_subset(reader, str(tmp_path / "b"), {1: [FIRST, THIRD]}, contract={"batch": 4})
    cut = RecordingReader(str(tmp_path / "b"))
    assert cut.steps() == {"train": [1]}
    answer = cut.load_step(RolloutRequest(global_step=1, batch_size=4, policy_version=1, group_size=2))
    whole = make_batch(3, 2, seed=1)
    assert answer.batch.is_identical(replace(whole.select([0, 1, 4, 5]), group_size=2))
    assert size_bytes == sum(path.stat().st_size for path in (tmp_path / "b" / "train").iterdir())


def test_what_is_true_of_whole_batches_alone_is_not_said_of_a_part(tmp_path: Path) -> None:
    reader = record(tmp_path / "a")
    write_subset(reader, str(tmp_path / "b"), {0: [SECOND]}, contract={})
    info = RecordingReader(str(tmp_path / "b")).open_step(RolloutRequest(global_step=0, batch_size=2)).info
    assert (info.metrics, info.data_cursor, info.scheduler_state, info.policy_version) == ({}, None, {"seen": 0}, 0)
    assert info.run_id != reader.manifest.run_id


def test_the_manifest_says_what_it_was_cut_from(tmp_path: Path) -> None:
    reader = record(tmp_path / "a")
    write_subset(reader, str(tmp_path / "b"), {0: [SECOND], 1: [SECOND, THIRD]}, contract={"batch": 2})
    manifest = RecordingReader(str(tmp_path / "b")).manifest
    assert (manifest.provenance["vocabulary"], manifest.provenance["settings"]) == (["a", "b"], {"NCCL_ALGO": "Ring"})
    origin = manifest.provenance["cut_from"]
    assert isinstance(origin, dict)
    assert origin["run_id"] == reader.manifest.run_id
    assert origin["packages"] == reader.manifest.provenance["packages"]
    assert origin["groups"] == {"0": ["group 1/episode 0"], "1": ["group 1/episode 0", "group 2/episode 0"]}
    values = {field.name: field.value for field in manifest.contract.fields}
    assert values == {"sequence_length": 64, "vocab_size": 16, "batch": 2, "layout": "tp1"}


def test_a_recorder_reads_of_itself_what_the_part_keeps_aside() -> None:
    assert set(RECORDER_KEYS) == set(collect_provenance({}))


def test_a_part_can_be_cut_again(tmp_path: Path) -> None:
    record(tmp_path / "a")
    write_subset(RecordingReader(str(tmp_path / "a")), str(tmp_path / "b"), {0: [FIRST, SECOND]}, contract={})
    middle = RecordingReader(str(tmp_path / "b"))
    write_subset(middle, str(tmp_path / "c"), {0: [SECOND]}, contract={})
    last = RecordingReader(str(tmp_path / "c"))
    origin = last.manifest.provenance["cut_from"]
    assert isinstance(origin, dict)
    assert origin["run_id"] == middle.manifest.run_id
    assert load_train_step(last, 0).num_groups == 1


@pytest.mark.parametrize(
    ("groups", "contract", "message"),
    [
        ({0: [("default", 7, 0)]}, {}, "the recorded step has no group 7/episode 0"),
        ({0: [FIRST]}, {"bach": 2}, "the recording's contract has no field bach"),
    ],
)
def test_what_is_not_there_is_an_error(
    tmp_path: Path, groups: dict[int, list[GroupKey]], contract: dict[str, int], message: str
) -> None:
    reader = record(tmp_path / "a")
    with pytest.raises(RecordingError) as caught:
        write_subset(reader, str(tmp_path / "b"), groups, contract=contract)
    assert str(caught.value) == message


def test_a_step_that_was_not_recorded_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StepNotFoundError, match="step_000005"):
        write_subset(record(tmp_path / "a"), str(tmp_path / "b"), {5: [FIRST]}, contract={})


def test_the_order_of_the_groups_asked_for_does_not_matter() -> None:
    batch = make_batch(3, 2)
    assert select_groups(batch, [THIRD, FIRST]).is_identical(select_groups(batch, [FIRST, THIRD]))
