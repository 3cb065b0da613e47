"""``verify``: every kind of damage, planted, is found and named; nothing hides another problem."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mock_scheduler import cli
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.commands.recordings import run_verify
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.recording.inspection.verification import verify_recording
from mock_scheduler.recording.retention import RetentionRecord, save_retention
from mock_scheduler.recording.storage import open_storage
from tests.recording.builders import SAMPLING, make_batch, make_row
from tests.report.recordings import (
    IN_PLACE,
    file_size,
    flip_last_byte,
    make_console,
    record,
    size_of,
    verify,
    write,
    write_shards,
)


def test_verify_finds_a_recording_of_every_form_whole(tmp_path: Path) -> None:
    folder = record(tmp_path, {0: make_batch()})
    write_shards(folder, 1, make_batch(seed=1), count=2)
    write(folder, {2: make_batch(seed=2)}, options=replace(IN_PLACE, compression="zstd"))
    record(folder, {0: make_batch(seed=3)}, mode="val")
    train, val = folder / "train", folder / "val"
    size = size_of(*train.glob("*.safetensors"), *train.glob("*/*"), *train.glob("*.zst"), *val.glob("*"))
    assert verify(folder) == (0, [f"{folder}: 4 steps, {size}: whole, every digest matches"])
    one = size_of(train / "step_000002.safetensors.zst")
    assert verify(folder, steps="2") == (0, [f"{folder}: 1 step, {one}: whole, every digest matches"])


def test_verify_names_every_problem_and_not_only_the_first(tmp_path: Path) -> None:
    folder = record(tmp_path, {step: make_batch(seed=step) for step in range(4)})
    write_shards(folder, 4, make_batch(seed=4), count=4)
    write(folder, {5: make_batch(seed=5)}, options=replace(IN_PLACE, compression="zstd"))
    train = folder / "train"
    flip_last_byte(train / "step_000000.safetensors")
    with (train / "step_000001.safetensors").open("r+b") as file:
        file.truncate(file_size(train, 1) - 1)
    (train / "step_000002.safetensors").rename(train / "step_000012.safetensors")
    shards = [train / "step_000004" / f"shard_{index:05d}-of-00004.safetensors" for index in range(4)]
    flip_last_byte(shards[0])
    shards[1].unlink()
    shards[2].write_bytes(shards[3].read_bytes())
    flip_last_byte(train / "step_000005.safetensors.zst")
    code, lines = verify(folder)
    assert code == 5
    assert lines[0] == "note: train has no steps 2, 6-11, between others that are recorded"
    lines = lines[1:]
    assert lines[0] == f"{folder}: 7 problems (6 steps read, {size_of(train / 'step_000003.safetensors')} whole):"
    changed = "the file was changed after it was written. Restore it from a copy or record the step again."
    assert [line.removeprefix(f"  - {train}/") for line in lines[1:3]] == [
        f"step_000000.safetensors: tensor 'terminations' does not match its digest: {changed}",
        f"step_000001.safetensors: file has {file_size(train, 1)} bytes; "
        f"its header describes {file_size(train, 1) + 1}: truncated",
    ]
    assert lines[3].startswith(
        f"  - {shards[0]}: tensor 'terminations' does not match its digest: the file was changed"
    )
    assert lines[4].startswith(f"  - {shards[1]}: this shard of a committed step is missing.")
    assert lines[5].startswith(f"  - {shards[2]}: this is not the shard that was committed: its digest is ")
    assert lines[6].startswith(f"  - {train}/step_000005.safetensors.zst: the zstd frame is damaged")
    assert lines[7] == (
        f"  - [Rollout Mock] {train}/step_000012.safetensors holds another step than its name says: step 2 instead of "
        "12. It was renamed, moved or copied from another recording: restore it or record again."
    )
    assert len(lines) == 8


def test_verify_finds_a_step_of_another_run(tmp_path: Path) -> None:
    folder = record(tmp_path / "v1", {0: make_batch()})
    other = record(tmp_path / "v2", {1: make_batch()}, run_id="run-2")
    (other / "train" / "step_000001.safetensors").rename(folder / "train" / "step_000001.safetensors")
    assert verify(folder) == (
        5,
        [
            f"{folder}: 1 problem (2 steps read, {size_of(folder / 'train' / 'step_000000.safetensors')} whole):",
            f"  - [Rollout Mock] {folder}/train/step_000001.safetensors holds another step than its name says: run_id "
            "'run-2' instead of 'run-1'. It was renamed, moved or copied from another recording: restore it or record "
            "again.",
        ],
    )


def test_verify_finds_a_step_that_lies_there_twice_and_goes_on(tmp_path: Path) -> None:
    folder = record(tmp_path, {0: make_batch(), 1: make_batch(seed=1)})
    train = folder / "train"
    (train / "step_000000.safetensors.zst").write_bytes(b"")
    flip_last_byte(train / "step_000001.safetensors")
    code, lines = verify(folder)
    assert code == 5
    assert lines[0] == f"{folder}: 2 problems (1 step read, nothing whole):"
    assert lines[1] == (
        f"  - [Rollout Mock] {train}/step_000000.safetensors and {train}/step_000000.safetensors.zst are the same "
        "step: remove all but the one that is meant"
    )
    assert lines[2].startswith(f"  - {train}/step_000001.safetensors: tensor 'terminations' does not match its digest")


@pytest.mark.parametrize("name", ["recording.json", "retention.json"])
def test_verify_of_a_changed_small_file_still_reads_the_steps(name: str, tmp_path: Path) -> None:
    folder = record(tmp_path, {0: make_batch(), 1: make_batch(seed=1)})
    save_retention(open_storage(str(folder)), RetentionRecord(start_points=(0, 3)))
    flip_last_byte(folder / "train" / "step_000001.safetensors")
    path = folder / name
    path.write_bytes(path.read_bytes().replace(b": 1", b": 2", 1))
    code, lines = verify(folder)
    assert code == 5
    assert (
        lines[0]
        == f"{folder}: 2 problems (2 steps read, {size_of(folder / 'train' / 'step_000000.safetensors')} whole):"
    )
    assert lines[1] == (
        f"  - {path}: does not match its digest: it was changed after it was written. Restore it from a copy or record "
        "again."
    )
    assert "step_000001.safetensors: tensor 'terminations' does not match its digest" in lines[2]


def test_verify_notes_what_is_no_step(tmp_path: Path) -> None:
    folder = record(tmp_path, {0: make_batch()})
    write_shards(folder, 1, make_batch(seed=1), count=2)
    train = folder / "train"
    (train / "step_000001" / "commit.json").unlink()
    (train / "notes.txt").write_text("x", encoding="utf-8")
    code, lines = verify(folder)
    assert code == 0
    assert lines == [
        f"note: {train}/notes.txt is no recorded step",
        f"note: {train}/step_000001 has no commit.json: not all of its writers finished, so it is no recorded step",
        f"{folder}: 1 step, {size_of(train / 'step_000000.safetensors')}: whole, every digest matches",
    ]


def test_verify_of_nothing_is_no_success(tmp_path: Path) -> None:
    folder = record(tmp_path, {})
    assert verify(folder) == (5, [f"{folder}: 1 problem (no step read):", f"  - {folder} holds no step"])
    record(folder, {0: make_batch()})
    assert verify(folder, steps="3-") == (
        5,
        [
            f"{folder}: 1 problem (no step read):",
            f"  - none of the steps 3- is recorded in {folder}; steps present: train 0",
        ],
    )


def test_verify_notes_steps_that_are_missing_between_others(tmp_path: Path) -> None:
    """It called a recording whole without a word on a step that somebody had deleted; ``every: 2`` leaves gaps too."""
    folder = record(tmp_path, {step: make_batch(seed=step) for step in (3, 5, 7, 8)})
    removed = {"train": StepRanges.parse("0-2, 6")}
    save_retention(open_storage(str(folder)), RetentionRecord(start_points=(0, 3), removed=removed))
    code, lines = verify(folder)
    assert (code, lines[:-1]) == (0, ["note: train has no step 4, between others that are recorded"])
    assert verify(folder, steps="3, 5")[1][0].startswith(f"{folder}: 2 steps, ")


@pytest.mark.parametrize(
    ("mode", "steps", "gaps"),
    [
        ("train", (0, 10, 20), None),
        ("train", (0, 10, 30), "step 20"),
        ("train", (0, 2), "step 1"),
        ("val", (0, 2), None),  # validation every other step of three
        ("val", (4,), None),
        ("val", (0, 2, 3), "step 1"),
    ],
)
def test_steps_that_are_equally_far_apart_have_no_gaps(
    mode: str, steps: tuple[int, ...], gaps: str | None, tmp_path: Path
) -> None:
    lines = verify(record(tmp_path, {step: make_batch(seed=step) for step in steps}, mode=mode))[1]
    assert lines[:-1] == ([] if gaps is None else [f"note: {mode} has no {gaps}, between others that are recorded"])


def test_two_validations_at_one_distance_have_no_gap(tmp_path: Path) -> None:
    """It noted that val has no step 1, of a run with ``eval_steps: 2``."""
    assert verify(record(tmp_path, {step: make_batch(seed=step) for step in (0, 2)}, mode="val"))[1][:-1] == []


@pytest.mark.parametrize("name", ["step_1.safetensors", "step_000001.pt", "step_1", "Step-0001.safetensors.zst.bak"])
def test_verify_finds_a_file_that_bears_the_number_of_a_step_that_is_not_there(name: str, tmp_path: Path) -> None:
    folder = record(tmp_path, {0: make_batch(), 2: make_batch(seed=2)})
    train = folder / "train"
    (train / name).write_bytes(b"x")
    size = size_of(*train.glob("step_00000[02].safetensors"))
    assert verify(folder) == (
        5,
        [
            "note: train has no step 1, between others that are recorded",
            f"{folder}: 1 problem (2 steps read, {size} whole):",
            f"  - {train}/{name} is named like step 1, which is not recorded, and is not read: a step is "
            "step_000001.safetensors, step_000001.safetensors.zst or a folder step_000001",
        ],
    )


def test_verify_only_notes_a_file_beside_the_step_whose_number_it_bears(tmp_path: Path) -> None:
    folder = record(tmp_path, {0: make_batch()})
    (folder / "train" / "step_000000.pt").write_bytes(b"x")
    code, lines = verify(folder)
    assert (code, lines[0]) == (0, f"note: {folder}/train/step_000000.pt is no recorded step")


def test_verify_lists_the_first_of_very_many_problems_and_all_of_them_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(tmp_path / "v1", {0: make_batch()})
    for step in range(1, 54):
        (folder / "train" / f"step_{step:06d}.pt").touch()
    for number in range(12):
        (folder / "train" / f"note_{number:02d}.txt").touch()
    lines = verify(folder)[1]
    assert lines[10] == "note: and 2 more (all with --json)"
    assert lines[11].startswith(f"{folder}: 53 problems (1 step read, ")
    assert (len(lines), lines[-1]) == (63, "  - and 3 more (all with --json)")
    assert cli.main(["verify", str(folder), "--json", "-"]) == 5
    value = json.loads(capsys.readouterr().out)
    assert (value["format_version"], value["is_whole"], value["num_steps"]) == (1, False, 1)
    assert (len(value["problems"]), len(value["notes"])) == (53, 12)
    path = tmp_path / "verify.json"
    assert cli.main(["verify", str(folder), "--json", str(path)]) == 5
    assert json.loads(path.read_text(encoding="utf-8")) == value
    assert capsys.readouterr().out.startswith("note: ")


def test_a_recording_at_a_url_is_looked_at_as_one_in_a_folder(tmp_path: Path) -> None:
    folder = record(tmp_path, {0: make_batch()})
    console, text = make_console()
    assert run_verify(f"file://{folder}", steps=None, json_path=None, console=console) == 0
    assert text.getvalue().startswith(f"file://{folder}: 1 step, ")


def test_verify_notes_data_that_cannot_be_true_in_a_recording_that_is_whole(tmp_path: Path) -> None:
    """The file is as it was written; what was written cannot be."""
    row = make_row(turn_rewards=(1.0,))
    ahead = replace(row, policy_versions=torch.tensor([57], dtype=torch.int32))
    batch = RolloutBatch.from_trajectories([ahead], sampling=SAMPLING, group_size=None)
    result = verify_recording(str(record(tmp_path / "x", {1: batch}, policy_version=1)))
    assert result.is_whole
    assert result.notes == (
        "train step 1: 1 turn of 1 with a policy version ahead of the policy: default/group 0/episode 0/env 0/turn 0: "
        "version 57, and the newest policy is 1",
    )
