"""A save that is ended at any moment leaves whole checkpoints or none, and nothing that goes on running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.programs import run_program

pytestmark = pytest.mark.timeout(1800)


def run_worker(*arguments: str) -> Any:
    finished = run_program("tests.pipelines.workers.saving_worker", arguments)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def test_everything_is_on_the_disk_before_the_last_file_has_its_name(tmp_path: Path) -> None:
    """Files and new folders of the checkpoint were not synced, and its last file was."""
    folder = tmp_path / "new" / "step_000001"
    events = [(kind, Path(path)) for kind, path, _ in run_worker("trace", str(folder))]
    commit = events.index(("rename", folder / "run_state.json"))
    synced = [path for kind, path in events[:commit] if kind == "fsync"]
    links = [(place, path) for place, (kind, path) in enumerate(events) if kind == "link"]
    assert {path.relative_to(folder).as_posix() for _, path in links} == {
        "policy/rank_00000.safetensors",
        "random_states/rank_00000.safetensors",
    }
    # A file under its hidden name, and its folder after it got its own.
    for place, path in links:
        before = [one for kind, one in events[:place] if kind == "fsync"]
        after = [one for kind, one in events[place:commit] if kind == "fsync"]
        assert any(one.parent == path.parent and one.name.startswith(f".{path.name}.") for one in before)
        assert path.parent in after
    assert any(one.name.startswith(".run_state.json.") for one in synced)
    # The new folders, in the folders that hold them.
    assert {tmp_path, folder.parent, folder} <= set(synced)
    assert ("fsync", folder) in events[commit:]


def test_a_save_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    """A killed save's hidden ``run_state.json`` stayed for ever beside the whole one of the next save."""
    left = (
        ".run_state.json.1.0a.tmp",
        "policy/.rank_00000.safetensors.1.0a.tmp",
        "random_states/rank_00007.safetensors",
    )
    for name in left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"{")
    run_worker("trace", str(tmp_path))
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == [
        "policy/rank_00000.safetensors",
        "random_states/rank_00000.safetensors",
        "run_state.json",
    ]


def check_kills(folder: Path, *, num_kills: int) -> None:
    found = run_worker("kill", str(folder / "checkpoints"), str(num_kills), "7")
    assert found["left"] == []
    assert found["problems"] == []
    assert found["kills"] == num_kills
    # Every other child ends before one of twelve calls, of which ten come before the last file has its name.
    assert found["torn"] >= num_kills // 3, found
    assert found["whole"] >= num_kills


def test_a_save_that_is_killed_leaves_no_process_and_no_broken_checkpoint(tmp_path: Path) -> None:
    check_kills(tmp_path, num_kills=6)


@pytest.mark.all
def test_200_saves_that_are_killed_leave_no_process_and_no_broken_checkpoint(tmp_path: Path) -> None:
    check_kills(tmp_path, num_kills=200)
