"""A step in several files: it exists once it is committed, reads as the one file would, and each shard is known."""

import itertools
import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import CorruptRecordingError, RecordingError, StepExistsError
from mock_scheduler.recording.reading.open_step import OpenStep, open_step
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.shards import commit_shards, decode_commit, encode_commit, load_commit, missing_shards
from mock_scheduler.recording.step.step_file import encode_step
from mock_scheduler.recording.storage import Storage, open_storage
from mock_scheduler.scheduler import RowShard
from tests.recording.builders import SAMPLING, make_batch, make_identity, make_info, make_row, make_rows
from tests.recording.step_bytes import make_rich_batch, with_extras
from tests.recording.step_recordings import RUN_ID, cut, record_shards, request, write_shards

SHARDS = ["shard_00000-of-00002.safetensors", "shard_00001-of-00002.safetensors"]


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def turns_batch() -> RolloutBatch:
    """Eight trajectories of one to three turns, each turn a row, in groups of two."""
    rows = []
    for index, num_turns in enumerate((1, 3, 2, 2, 1, 1, 2, 1)):
        for turn in range(num_turns):
            row = with_extras(make_row(tokens=(index, turn, 3, 4)), index + turn)
            rows.append(replace(row, identity=make_identity(index // 2, index % 2, turn=turn)))
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=2, meta={"a": 1})


def open_committed(storage: Storage, name: str, count: int) -> OpenStep:
    commit_shards(storage, name, count=count)
    return open_step(storage, name)


owners_of_rows = st.integers(1, 5).flatmap(
    lambda count: st.tuples(st.just(count), st.lists(st.integers(0, count - 1), min_size=13, max_size=13))
)


@settings(max_examples=20)
@given(owners_of_rows, st.sampled_from([1, 2, 4, 8]))
def test_any_split_of_the_rows_reads_as_the_one_file_would(split: tuple[int, list[int]], num_readers: int) -> None:
    """Shards may be empty, interleaved, and cut groups and trajectories; any number of readers may share the step."""
    count, owners = split
    batch = turns_batch()
    storage = open_storage(f"memory://shards/{uuid.uuid4()}")
    name = write_shards(storage, cut(batch, owners, count), group_size=2)
    step = open_committed(storage, name, count)
    assert step.load().digest() == batch.digest()
    assert (step.num_rows, step.num_trajectories, step.info.shard) == (13, 8, None)
    if num_readers == count:
        return  # gets the shards as they were recorded
    parts = [step.load(RowShard(index=index, count=num_readers)) for index in range(num_readers)]
    assert [part.num_trajectories for part in parts] == [8 // num_readers] * num_readers
    assert [identity for part in parts for identity in part.identities] == list(batch.identities)
    assert {part.group_size for part in parts} == {2 if num_readers < 8 else None}
    whole = RolloutBatch.concat([replace(part, group_size=None) for part in parts])
    assert replace(whole, group_size=2).digest() == batch.digest()


def test_shards_are_given_as_they_were_recorded_to_as_many_readers(tmp_path: Path) -> None:
    parts = cut(make_batch(), [1, 0, 1, 0], 2)
    record_shards(tmp_path, parts)
    reader = RecordingReader(str(tmp_path))
    for index, part in enumerate(parts):
        step = reader.load_step(request(), shard=RowShard(index=index, count=2))
        assert step.batch.is_identical(part)
        assert step.path == f"{tmp_path}/train/step_000000"
    with pytest.raises(RecordingError, match="4 trajectories, which 3 processes cannot share equally"):
        reader.load_step(request(), shard=RowShard(index=0, count=3))


def test_a_shard_tells_its_own_metrics_and_the_step_those_of_shard_0(storage: Storage, tmp_path: Path) -> None:
    parts = cut(make_batch(), [0, 0, 1, 1], 2)
    record_shards(tmp_path, parts, step=1)
    name = "train/step_000000"
    for index, part in enumerate(parts):
        info = make_info(0, metrics={"seconds": float(index)}, shard=(index, 2), run_id=RUN_ID)
        storage.publish(f"{name}/{SHARDS[index]}", encode_step(part, info).pieces)
    commit_shards(storage, name, count=2)
    reader = RecordingReader(str(tmp_path))
    assert reader.load_step(request()).info.metrics == {"seconds": 0.0}
    assert reader.load_step(request(), shard=RowShard(index=1, count=2)).info.metrics == {"seconds": 1.0}
    assert reader.load_step(request(), shard=RowShard(index=1, count=2)).info.shard is None


def test_a_step_exists_once_it_is_committed(storage: Storage, tmp_path: Path) -> None:
    record_shards(tmp_path, [make_batch(seed=1)], step=1)
    reader = RecordingReader(str(tmp_path))
    name = write_shards(storage, cut(make_batch(), [0, 1, 0, 1], 2))
    assert (reader.has_step(request()), reader.steps()) == (False, {"train": [1]})
    commit_shards(storage, name, count=2)
    assert (reader.has_step(request()), reader.steps()) == (True, {"train": [0, 1]})
    assert sorted(os.listdir(tmp_path / name)) == ["commit.json", *SHARDS]


def test_the_commit_says_what_it_commits(storage: Storage, tmp_path: Path) -> None:
    parts = cut(make_batch(), [0, 0, 0, 1], 2)
    name = record_shards(tmp_path, parts, data_cursor=7)
    commit = load_commit(storage, name)
    digests = [encode_step(part, make_info(shard=(i, 2), data_cursor=7)).digest for i, part in enumerate(parts)]
    assert [shard.name for shard in commit.shards] == SHARDS
    assert [shard.digest for shard in commit.shards] == digests
    assert [(shard.num_rows, shard.num_trajectories) for shard in commit.shards] == [(3, 3), (1, 1)]
    assert (commit.num_rows, commit.num_trajectories, commit.group_size) == (4, 4, None)
    assert commit.info == make_info(data_cursor=7)
    document = json.loads((tmp_path / name / "commit.json").read_text())
    assert (document["format"], document["version"]) == ("rollout-commit", 1)


def test_compressed_shards_are_committed_and_read(storage: Storage) -> None:
    batch = make_rich_batch(2, 2)
    name = write_shards(storage, cut(batch, [0, 1, 1, 0], 2), is_compressed=True, group_size=2)
    assert open_committed(storage, name, 2).load().digest() == batch.digest()
    assert [shard.name for shard in load_commit(storage, name).shards] == [f"{shard}.zst" for shard in SHARDS]


def test_the_group_size_of_shards_that_agree_is_that_of_the_whole(storage: Storage) -> None:
    batch = make_batch(4, 2)
    parts = [replace(part, group_size=2) for part in cut(batch, [0, 0, 1, 1, 1, 1, 0, 0], 2)]
    assert open_committed(storage, write_shards(storage, parts), 2).load().digest() == batch.digest()


def test_missing_shards_are_listed(storage: Storage, tmp_path: Path) -> None:
    name = write_shards(storage, cut(make_batch(), [0, 1, 2, 3], 4))
    assert missing_shards(storage, name, 4) == []
    for index in (1, 2):
        storage.remove(f"{name}/shard_0000{index}-of-00004.safetensors")
    assert missing_shards(storage, name, 4) == [1, 2]
    assert missing_shards(storage, "train/step_000009", 2) == [0, 1]
    with pytest.raises(RecordingError) as caught:
        commit_shards(storage, name, count=4)
    assert str(caught.value) == (
        f"[Rollout Mock] {tmp_path}/{name} cannot be committed: 2 of 4 shards are missing: 1-2"
    )
    assert not storage.exists(f"{name}/commit.json")


def test_all_ways_in_which_shards_do_not_fit_together_are_listed(storage: Storage, tmp_path: Path) -> None:
    name = "train/step_000000"
    batch = make_rich_batch(2, 2)
    first, second = cut(batch, [0, 0, 1, 1], 2)
    infos = [
        make_info(0, shard=(0, 2), data_cursor=5),
        make_info(1, shard=(0, 2), data_cursor=6, run_id="run-2", policy_version=1),
    ]
    other = RolloutBatch.from_trajectories(
        [*make_rows(1, 1), *second.rows()][:1],
        sampling=replace(SAMPLING, temperature=0.5),
        group_size=None,
        meta={"a": 1},
    )
    for shard, part, info in zip(SHARDS, (first, other), infos, strict=True):
        storage.publish(f"{name}/{shard}", encode_step(part, info).pieces)
    storage.publish(f"{name}/shard_00000-of-00003.safetensors", [b"another layout"])
    with pytest.raises(RecordingError) as caught:
        commit_shards(storage, name, count=2)
    sampling = '{"logprobs_mode":"processed","temperature":%s,"top_k":0,"top_p":1.0}'
    kinds = (
        '{"experts":["ragged","int16",[3]],"flags":["dense","bool",[3]],"messages":["json","uint8",[]],'
        '"score":["dense","float64",[]],"seen":["ragged","bool",[]]}'
    )
    assert str(caught.value).split("\n  - ") == [
        f"[Rollout Mock] {tmp_path}/{name} cannot be committed: its shards do not fit together:",
        "shard_00000-of-00003.safetensors is of another number of shards",
        f"{SHARDS[1]} says that it is shard (0, 2)",
        f"{SHARDS[1]} has step 1; shard 0 has 0",
        f'{SHARDS[1]} has run_id "run-2"; shard 0 has "run-1"',
        f"{SHARDS[1]} has policy_version 1; shard 0 has 0",
        f"{SHARDS[1]} has data_cursor 6; shard 0 has 5",
        f"{SHARDS[1]} has sampling {sampling % 0.5}; shard 0 has {sampling % 1.0}",
        f'{SHARDS[1]} has meta {{"a":1}}; shard 0 has {{"global_step":3,"names":["a",null]}}',
        f"{SHARDS[1]} has extras {{}}; {SHARDS[0]} has {kinds}",
        f"default/group 0/episode 0/env 0/turn 0 is in {SHARDS[0]} and in {SHARDS[1]}",
    ]
    assert not storage.exists(f"{name}/commit.json")


def test_many_rows_that_two_shards_hold_are_counted(storage: Storage) -> None:
    batch = replace(make_batch(15, 2), group_size=None)
    name = write_shards(storage, [batch, batch])
    with pytest.raises(RecordingError) as caught:
        commit_shards(storage, name, count=2)
    assert str(caught.value).endswith("\n  - and 10 more")
    assert str(caught.value).count("\n  - default/group") == 20


def test_groups_that_are_not_whole_over_all_shards_are_listed(storage: Storage) -> None:
    rows = make_rows(2, 2)[:3]
    batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=None)
    name = write_shards(storage, cut(batch, [0, 1, 0], 2), group_size=2)
    with pytest.raises(RecordingError, match=r"- default/group 1/episode 0: 1 of 2 trajectories$"):
        commit_shards(storage, name, count=2)


def test_a_damaged_shard_is_not_committed(storage: Storage, tmp_path: Path) -> None:
    name = write_shards(storage, cut(make_batch(), [0, 1, 0, 1], 2))
    path = tmp_path / name / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptRecordingError, match=f"{SHARDS[1]}: file has"):
        commit_shards(storage, name, count=2)


def test_committing_again_is_refused_over_other_shards(storage: Storage, tmp_path: Path) -> None:
    name = record_shards(tmp_path, cut(make_batch(), [0, 1, 0, 1], 2))
    before = (tmp_path / name / "commit.json").read_bytes()
    commit_shards(storage, name, count=2)
    for shard in SHARDS:
        storage.remove(f"{name}/{shard}")
    write_shards(storage, cut(make_batch(seed=1), [0, 1, 0, 1], 2))
    with pytest.raises(StepExistsError, match=r"commit\.json exists and commits other shards: it is not overwritten"):
        commit_shards(storage, name, count=2)
    assert (tmp_path / name / "commit.json").read_bytes() == before


def other_step(storage: Storage) -> None:
    write_shards(storage, cut(make_batch(), [0, 1, 0, 1], 2), step=9)


def other_run(storage: Storage) -> None:
    write_shards(storage, cut(make_batch(), [0, 1, 0, 1], 2), step=9, run_id="run-2")


def other_rows(storage: Storage) -> None:
    write_shards(storage, cut(make_batch(seed=1), [0, 1, 0, 1], 2), step=9)


@pytest.mark.parametrize("write_other", [other_step, other_run, other_rows])
def test_a_shard_that_was_replaced_by_another_sound_one_is_found(
    tmp_path: Path, write_other: Callable[[Storage], None]
) -> None:
    name = record_shards(tmp_path, cut(make_batch(), [0, 1, 0, 1], 2))
    write_other(open_storage(str(tmp_path)))
    shutil.copyfile(tmp_path / "train/step_000009" / SHARDS[1], tmp_path / name / SHARDS[1])
    reader = RecordingReader(str(tmp_path))
    reader.load_step(request(), shard=RowShard(index=0, count=2))
    for ask in (
        lambda: reader.load_step(request()),
        lambda: reader.load_step(request(), shard=RowShard(index=1, count=2)),
        lambda: reader.check_plan([request()], verify=True),
    ):
        with pytest.raises(CorruptRecordingError, match=f"{SHARDS[1]}: this is not the shard that was committed"):
            ask()


def test_a_committed_shard_that_is_gone_is_named(tmp_path: Path) -> None:
    name = record_shards(tmp_path, cut(make_batch(), [0, 1, 0, 1], 2))
    os.unlink(tmp_path / name / SHARDS[0])
    with pytest.raises(CorruptRecordingError) as caught:
        RecordingReader(str(tmp_path)).load_step(request())
    assert str(caught.value) == (
        f"{tmp_path}/{name}/{SHARDS[0]}: this shard of a committed step is missing. Restore it from a copy or record "
        "the step again."
    )


def test_a_flipped_bit_in_a_shard_is_found_and_named(tmp_path: Path) -> None:
    name = record_shards(tmp_path, cut(make_batch(), [0, 1, 0, 1], 2))
    path = tmp_path / name / SHARDS[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reader = RecordingReader(str(tmp_path))
    for verify in (reader.open_step(request()).verify, reader.open_step(request()).load):
        with pytest.raises(CorruptRecordingError, match=f"^{path}: tensor 'terminations' does not match its digest"):
            verify()


def test_a_reader_of_a_shard_opens_no_other(tmp_path: Path) -> None:
    name = record_shards(tmp_path, cut(make_batch(), [0, 1, 0, 1], 2))
    os.unlink(tmp_path / name / SHARDS[0])
    reader = RecordingReader(str(tmp_path))
    assert len(reader.load_step(request(), shard=RowShard(index=1, count=2)).batch) == 2


def test_reading_a_part_reads_only_its_rows_of_each_shard(storage: Storage) -> None:
    batch = replace(make_batch(32, 2), group_size=None)
    owners = [row % 2 for row in range(64)]
    step = open_committed(storage, write_shards(storage, cut(batch, owners, 2)), 2)
    part = step.load(RowShard(index=3, count=8))
    assert part.digest() == batch.select(list(range(24, 32))).digest()
    assert list(itertools.chain(part.identities)) == list(batch.identities[24:32])


def test_a_commit_with_a_name_that_leads_elsewhere_is_refused(storage: Storage, tmp_path: Path) -> None:
    name = record_shards(tmp_path, cut(make_batch(), [0, 1, 0, 1], 2))
    commit = load_commit(storage, name)
    shards = (replace(commit.shards[0], name="../../../etc/shard_00000-of-00002.safetensors"), commit.shards[1])
    with pytest.raises(CorruptRecordingError, match=r"^x: content is no commit: shards are named \["):
        decode_commit(encode_commit(replace(commit, shards=shards)), source="x")
    with pytest.raises(CorruptRecordingError, match=r"^x: content is no commit: shards are named \["):
        decode_commit(encode_commit(replace(commit, shards=())), source="x")
