"""Old steps go only where all that stays can still be replayed, whenever the process ends."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.config.rollout_mock import RetentionConfig
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import CorruptRecordingError, StepExistsError, StepNotFoundError
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.retention import (
    RetentionRecord,
    find_removable,
    load_retention,
    note_checkpoint,
    num_more_kept,
    replay_starts,
    save_retention,
)
from mock_scheduler.recording.sealed import encode_sealed
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.recording.storage.local import LocalStorage
from mock_scheduler.recording.writing.opening import RecordingWriter, WriterOptions, open_recording
from mock_scheduler.recording.writing.sharded import Patience
from mock_scheduler.scheduler import RolloutRequest, RowShard
from tests.recording.builders import make_batch, make_contract, make_info
from tests.recording.processes import run_in_child

# Python 3.12 warns of a fork beside threads, of which torch and earlier tests may have left some: ours need none.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def keep(last: int | None, pins: str | None = None) -> RetentionConfig:
    return RetentionConfig(keep_last=last, pin_steps=pins)


def open_writer(dump_dir: Path | str, retention: RetentionConfig, **changes: object) -> RecordingWriter:
    values: dict[str, object] = {"contract": make_contract(), "plan": (), "provenance": {}, "resume": False}
    options = WriterOptions(retention=retention, **changes.pop("options", {}))  # type: ignore[arg-type]
    return open_recording(str(dump_dir), options=options, **{**values, **changes})


def submit(writer: RecordingWriter, steps: Iterable[int], **info: object) -> None:
    for step in steps:
        writer.submit(make_batch(seed=step), make_info(step, run_id=writer.run_id, **info))


def steps_of(dump_dir: Path | str) -> dict[str, list[int]]:
    return RecordingReader(str(dump_dir)).steps()


def request(step: int, **changes: object) -> RolloutRequest:
    return RolloutRequest(**{"global_step": step, "batch_size": 4, **changes})


# ---------------------------------------------------------------------------------------------------------- which steps


@pytest.mark.parametrize(
    ("start_points", "last", "expected"),
    [
        ([0, 40], 20, {}),  # from 40 on there is nothing to replay yet
        ([0, 20, 40], 20, {"train": list(range(20)), "val": [0, 10]}),
        ([0, 10, 20, 30, 40], 20, {"train": list(range(20)), "val": [0, 10]}),
        ([0, 15, 40], 20, {"train": list(range(15)), "val": [0, 10]}),
        ([0, 21, 40], 20, {}),  # only 19 steps from 21 on
        ([0, 20, 40], None, {}),
        ([0, 20, 40], 1000, {}),
    ],
)
def test_steps_go_before_the_latest_start_from_which_enough_remain(
    start_points: list[int], last: int | None, expected: dict[str, list[int]]
) -> None:
    steps = {"train": list(range(40)), "val": [0, 10, 20, 30]}
    assert find_removable(steps, start_points, keep(last)) == expected


def test_pinned_steps_stay() -> None:
    steps = {"train": list(range(6)), "val": [0, 2]}
    assert find_removable(steps, [0, 4], keep(2, "0, 2-3")) == {"train": [1]}


def test_schedulers_that_play_the_same_steps_count_them_once() -> None:
    steps = {"train": [0, 1, 2, 3], "train.math": [0, 1, 2, 3]}
    assert find_removable(steps, [0, 3], keep(2)) == {}
    assert find_removable(steps, [0, 2], keep(2)) == {"train": [0, 1], "train.math": [0, 1]}


@given(
    recorded=st.sets(st.integers(0, 60)),
    start_points=st.sets(st.integers(0, 60)),
    last=st.integers(1, 20),
    pins=st.sets(st.integers(0, 60), max_size=5),
)
def test_whatever_goes_enough_can_be_replayed_from_a_start(
    recorded: set[int], start_points: set[int], last: int, pins: set[int]
) -> None:
    starts = sorted({0, *start_points})
    retention = RetentionConfig(keep_last=last, pin_steps=StepRanges.of(pins) if pins else None)
    removed = set(find_removable({"train": sorted(recorded)}, starts, retention).get("train", []))
    kept = recorded - removed
    assert not removed & pins
    # Some start has every step recorded after it, and at least the wanted number of them (all, where fewer exist).
    whole = [start for start in starts if {step for step in recorded if step >= start} <= kept]
    assert max(sum(step >= start for step in kept) for start in whole) >= min(last, len(recorded))
    assert find_removable({"train": sorted(kept)}, starts, retention) == {}


# ------------------------------------------------------------------------------------------------------------- the file


def test_the_record_is_read_back_and_is_empty_where_nothing_was_removed(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert load_retention(storage) == RetentionRecord(start_points=(0,), removed={})
    record = RetentionRecord(start_points=(0, 20, 40), removed={"train": StepRanges.parse("0-19")})
    save_retention(storage, record)
    assert load_retention(storage) == record
    assert storage.list_names("") == ["retention.json"]


def test_a_changed_record_is_corrupt(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    save_retention(storage, RetentionRecord(start_points=(0, 20)))
    path = tmp_path / "retention.json"
    path.write_bytes(path.read_bytes().replace(b"20", b"21"))
    with pytest.raises(CorruptRecordingError, match=r"retention.json: does not match its digest"):
        load_retention(storage)


# ---------------------------------------------------------------------------------------------------------- in a writer


def test_a_saved_checkpoint_removes_what_is_not_kept_and_the_reader_says_so(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, keep(20))
    submit(writer, [0, 20], mode="val")
    for start in (20, 40):
        submit(writer, range(start - 20, start))
        writer.checkpoint_saved(start)
    writer.close()
    assert steps_of(tmp_path) == {"train": list(range(20, 40)), "val": [20]}
    assert RecordingReader(str(tmp_path)).check_plan([request(step) for step in range(20, 40)], verify=True) > 0
    with pytest.raises(StepNotFoundError) as caught:
        RecordingReader(str(tmp_path)).check_plan([request(step) for step in range(40)])
    assert str(caught.value) == (
        f"[Rollout Mock] Mock file not found: {tmp_path}/train/step_000000.safetensors (and 19 more)\n"
        "All missing steps were recorded, and then removed as rollout_mock.retention says.\n"
        "Steps present: train 20-39; val 20\n"
        "Steps removed by retention: train 0-19\n"
        "Steps from which a replay can start, with the checkpoint of the recording run: 20\n"
        "Start the replay there, or record again and keep more (rollout_mock.retention.keep_last, pin_steps)."
    )
    with pytest.raises(StepNotFoundError) as caught:  # step 40 was never there: the usual reasons count
        RecordingReader(str(tmp_path)).check_plan([request(step) for step in (19, 40)])
    assert str(caught.value) == (
        f"[Rollout Mock] Mock file not found: {tmp_path}/train/step_000019.safetensors (and 1 more)\n"
        "Possible reasons:\n"
        "  1. Steps train 19, 40 were not run in dump mode\n"
        f"  2. dump_dir configuration is incorrect: {tmp_path}\n"
        "  3. mode mismatch (current: train)\n"
        "Steps present: train 20-39; val 20\n"
        "Steps removed by retention: train 19\n"
        "Please run in dump mode first to ensure all step data is generated."
    )


@pytest.mark.parametrize(
    ("starts", "present", "expected"),
    [
        ((0, 4, 8), {"train": [4, 5, 6, 7, 8]}, [4, 8]),
        ((0, 3, 8), {"train": [4, 5, 6, 7, 8]}, [8]),  # 3 itself is gone
        ((0, 4, 9), {"train": [4, 5, 6, 7, 8], "val": [9]}, [4]),  # nothing to train with from 9 on
        ((0,), {}, []),
    ],
)
def test_a_replay_starts_where_nothing_is_missing_after_it(
    starts: tuple[int, ...], present: dict[str, list[int]], expected: list[int]
) -> None:
    record = RetentionRecord(start_points=starts, removed={"train": StepRanges.parse("0-3")})
    assert replay_starts(record, present) == expected


def test_a_checkpoint_waits_for_the_steps_before_it(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, keep(1))
    submit(writer, range(10))
    writer.checkpoint_saved(9)
    assert steps_of(tmp_path) == {"train": [9]}
    writer.close()


def test_everything_is_kept_without_retention_and_no_file_is_made(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, keep(None))
    submit(writer, range(3))
    writer.checkpoint_saved(3)
    writer.close()
    assert sorted(os.listdir(tmp_path)) == ["recording.json", "train"]


def test_a_run_that_resumes_after_a_removal_goes_on(tmp_path: Path) -> None:
    """Resumed at 40, and once more at the earlier checkpoint 20, whose steps are there and must come out equal."""
    writer = open_writer(tmp_path, keep(20), run_id="r")
    for start in (20, 40):
        submit(writer, range(start - 20, start))
        writer.checkpoint_saved(start)
    writer.close()
    writer = open_writer(tmp_path, keep(20), resume=True, plan=[request(step) for step in range(40, 50)])
    submit(writer, range(40, 50))
    writer.checkpoint_saved(50)
    writer.close()
    assert steps_of(tmp_path) == {"train": list(range(20, 50))}
    writer = open_writer(tmp_path, keep(20), resume=True, plan=[request(step) for step in range(20, 60)])
    submit(writer, range(20, 60))
    writer.checkpoint_saved(60)
    with pytest.raises(StepExistsError):
        writer.write_step(make_batch(seed=1), make_info(59, run_id="r"))
    writer.close()
    assert steps_of(tmp_path) == {"train": list(range(40, 60))}
    record = load_retention(open_storage(str(tmp_path)))
    assert (record.start_points, str(record.removed["train"])) == ((0, 20, 40, 50, 60), "0-39")


def test_a_removed_step_that_is_recorded_again_is_there_until_the_next_checkpoint(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, keep(2), run_id="r")
    submit(writer, range(4))
    writer.checkpoint_saved(2)
    writer.close()
    writer = open_writer(tmp_path, keep(2), resume=True)
    submit(writer, [1])
    writer.flush()
    assert steps_of(tmp_path) == {"train": [1, 2, 3]}
    RecordingReader(str(tmp_path)).load_step(request(1))
    writer.checkpoint_saved(4)
    writer.close()
    assert steps_of(tmp_path) == {"train": [2, 3]}


class EndsEarly(LocalStorage):
    """A folder whose process ends at the k-th change of a file."""

    changes_left = 0

    def _count(self) -> None:
        type(self).changes_left -= 1
        if self.changes_left < 0:
            raise KeyboardInterrupt

    def replace(self, name: str, data: bytes) -> None:
        self._count()
        super().replace(name, data)

    def remove(self, name: str) -> None:
        self._count()
        super().remove(name)


def test_wherever_the_process_ends_the_rest_can_be_replayed_and_the_next_checkpoint_completes(tmp_path: Path) -> None:
    num_tried = 0
    for num_changes in range(8):
        folder = tmp_path / str(num_changes)
        writer = open_writer(folder, keep(4), run_id="r")
        submit(writer, range(8))
        submit(writer, [0, 4], mode="val")
        writer.close()
        EndsEarly.changes_left = num_changes
        if num_changes < 6:  # the record, four train steps and one of validation
            with pytest.raises(KeyboardInterrupt):
                note_checkpoint(EndsEarly(str(folder)), 4, keep(4))
            num_tried += 1
        else:
            note_checkpoint(EndsEarly(str(folder)), 4, keep(4))
        steps, record = steps_of(folder), load_retention(open_storage(str(folder)))
        assert RecordingReader(str(folder)).check_plan([request(step) for step in range(4, 8)], verify=True) > 0
        gone = [step for step in range(8) if step not in steps["train"]]
        assert gone == list(range(len(gone)))
        assert all(step in record.removed["train"] for step in gone)
        assert record.start_points == ((0,) if num_changes == 0 else (0, 4))
        assert note_checkpoint(open_storage(str(folder)), 4, keep(4)) == find_removable(steps, [0, 4], keep(4))
        assert steps_of(folder) == {"train": [4, 5, 6, 7], "val": [4]}
        assert RecordingReader(str(folder)).check_plan([request(step) for step in range(4, 8)], verify=True) > 0
    assert num_tried == 6


def test_removing_a_committed_step_leaves_it_whole_or_absent(tmp_path: Path) -> None:
    options = [
        {"shard": RowShard(index=i, count=2), "background": False, "patience": Patience(timeout_s=0)} for i in (0, 1)
    ]
    writers = [open_writer(tmp_path, keep(1), run_id="r", options=values) for values in options]
    for step in range(3):
        for index in (1, 0):
            part = make_batch(seed=step).select([2 * index, 2 * index + 1])
            writers[index].submit(part, make_info(step, run_id="r"))
    writers[1].checkpoint_saved(2)
    assert steps_of(tmp_path) == {"train": [0, 1, 2]}
    writers[0].checkpoint_saved(2)
    assert steps_of(tmp_path) == {"train": [2]}
    assert sorted(name for name in os.listdir(tmp_path / "train") if not name.startswith(".lock")) == ["step_000002"]


def test_a_writer_that_has_written_nothing_removes_nothing(tmp_path: Path) -> None:
    """A cache run that only replayed removed steps that another run, whose plan was checked, was still to read."""
    writer = open_writer(tmp_path, keep(2), run_id="r")
    submit(writer, range(8))
    writer.close()
    before = open_storage(str(tmp_path)).list_names("")
    joined = open_writer(tmp_path, keep(2), resume=True)
    assert joined.checkpoint_saved(5) == {}
    submit(joined, [7])  # is there already
    assert joined.checkpoint_saved(6) == {}
    assert (steps_of(tmp_path), open_storage(str(tmp_path)).list_names("")) == ({"train": list(range(8))}, before)
    submit(joined, [8])
    assert joined.checkpoint_saved(7) == {"train": list(range(7))}
    joined.close()
    assert steps_of(tmp_path) == {"train": [7, 8]}


def write_record(folder: Path, document: dict[str, object]) -> None:
    (folder / "retention.json").write_bytes(encode_sealed(document, format_name="rollout-retention", version=1))


@pytest.mark.parametrize(
    ("starts", "problem"),
    [
        (["x"], "start_points[0] is 'x': expected a whole number"),
        ([None, 3], "start_points[0] is None: expected a whole number"),
        ("ab", "start_points is 'ab': expected a list"),
        ([-5], "start_points[0] is -5: expected at least 0"),
        ([1.5], "start_points[0] is 1.5: expected a whole number"),
        ([True], "start_points[0] is True: expected a whole number"),
        (5, "start_points is 5: expected a list"),
    ],
)
def test_start_points_that_are_no_steps_are_corrupt(tmp_path: Path, starts: object, problem: str) -> None:
    """They were a TypeError out of the next checkpoint."""
    write_record(tmp_path, {"start_points": starts, "removed": {}})
    with pytest.raises(CorruptRecordingError) as caught:
        note_checkpoint(open_storage(str(tmp_path)), 4, keep(1))
    assert str(caught.value) == f"{tmp_path}/retention.json: content is no retention record: {problem}"


@pytest.mark.parametrize("removed", [{"train": 3}, {"train": ["0-3"]}, {"train": "x"}, ["train"]])
def test_removed_steps_that_are_none_are_corrupt(tmp_path: Path, removed: object) -> None:
    write_record(tmp_path, {"start_points": [0], "removed": removed})
    with pytest.raises(CorruptRecordingError, match=r"retention\.json: content is no retention record"):
        load_retention(open_storage(str(tmp_path)))


def test_checkpoints_of_several_processes_are_all_noted(tmp_path: Path) -> None:
    """Read, changed and written back without a lock, one of two notes was lost."""
    writer = open_writer(tmp_path, keep(5), run_id="r")
    submit(writer, range(10))
    writer.close()
    storage = open_storage(str(tmp_path))

    def note(parity: int) -> None:
        for start in range(parity, 40, 2):
            note_checkpoint(storage, start, keep(5))

    first, second = (lambda: note(0)), (lambda: note(1))
    child = os.fork()
    if child == 0:
        os._exit(0 if run_in_child(first) == "done" else 1)
    assert run_in_child(second) == "done"
    assert os.waitpid(child, 0)[1] == 0
    assert load_retention(storage).start_points == tuple(range(40))
    assert steps_of(tmp_path) == {"train": [5, 6, 7, 8, 9]}


# --------------------------------------------------------------------------------------------------------- the forecast


@pytest.mark.parametrize(
    ("steps", "starts", "num_remaining", "retention", "expected"),
    [
        (range(3), (0,), 97, keep(None), 97),
        (range(3), (0,), 97, keep(20), 17),  # no checkpoint yet: the distance is not known
        (range(10), (0, 10), 90, keep(20), 30),  # 20 kept and two distances of 10, of which 10 are there
        (range(60, 100), (0, 10, 100), 7, keep(20), 7),
        (range(200), (0, 10), 90, keep(20), 0),
        (range(10), (0, 10), 90, keep(20, "0-4"), 35),  # pinned steps take none of the places
    ],
)
def test_what_retention_will_keep_at_most(
    steps: range, starts: tuple[int, ...], num_remaining: int, retention: RetentionConfig, expected: int
) -> None:
    record = RetentionRecord(start_points=starts)
    assert num_more_kept({"train": list(steps)}, num_remaining, record=record, retention=retention) == expected
