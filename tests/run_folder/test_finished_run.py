"""What a run that ended says about itself is read with every value checked, and all that is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mock_scheduler.errors import AlignmentError
from mock_scheduler.run_folder.finished_run import RunFailure, load_batches, load_failure, load_summary

STATED = {
    "status": "completed",
    "layout": "tp1",
    "wall_s": 3,
    "rollout_s": 1.5,
    "batches": {"0": "aa", "1": "bb"},
}


def write_run(folder: Path, *, ledger: object = None, **changes: object) -> Path:
    """A completed run's files with some values changed; returns its ``run.json``."""
    (folder / "run.json").write_text(json.dumps({**STATED, **changes}))
    (folder / "ledger.json").write_text(json.dumps({"built": {"engine": 1}} if ledger is None else ledger))
    return folder / "run.json"


def test_a_completed_run_is_summarised(tmp_path: Path) -> None:
    write_run(tmp_path)
    summary = load_summary("one", tmp_path, elapsed_s=None)
    assert (summary.name, summary.layout, summary.wall_s, summary.rollout_s) == ("one", "tp1", 3.0, 1.5)
    assert (summary.elapsed_s, summary.built, summary.batches) == (3.0, {"engine": 1}, {"0": "aa", "1": "bb"})
    assert load_summary("one", tmp_path, elapsed_s=9.0).elapsed_s == 9.0
    assert load_batches(tmp_path) == {0: "aa", 1: "bb"}


def test_what_draws_in_training_may_be_stated(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert load_summary("one", tmp_path, elapsed_s=None).draws == ()
    path = write_run(tmp_path, draws=["hidden_dropout"])
    assert load_summary("one", tmp_path, elapsed_s=None).draws == ("hidden_dropout",)
    write_run(tmp_path, draws=True)
    with pytest.raises(AlignmentError) as caught:
        load_summary("one", tmp_path, elapsed_s=None)
    assert str(caught.value) == f"{path}: draws is True, expected a list of texts"


def test_everything_wrong_in_a_file_is_listed(tmp_path: Path) -> None:
    path = write_run(tmp_path, status="going", wall_s="long", batches={"0": 1})
    with pytest.raises(AlignmentError) as caught:
        load_summary("one", tmp_path, elapsed_s=None)
    assert str(caught.value) == (
        f"{path}: status is 'going', expected 'completed'; wall_s is 'long', expected a number; batches is {{'0': 1}}, "
        "expected an object of digests by step"
    )


@pytest.mark.parametrize(
    ("ledger", "problem"),
    [
        ({}, "built is missing"),
        ({"built": {"engine": True}}, "built is {'engine': True}, expected an object of integers"),
    ],
)
def test_a_ledger_without_counts_is_an_error(tmp_path: Path, ledger: object, problem: str) -> None:
    write_run(tmp_path, ledger=ledger)
    with pytest.raises(AlignmentError) as caught:
        load_summary("one", tmp_path, elapsed_s=None)
    assert str(caught.value) == f"{tmp_path / 'ledger.json'}: {problem}"


def test_a_file_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    path.write_text("[1]")
    with pytest.raises(AlignmentError) as caught:
        load_batches(tmp_path)
    assert str(caught.value) == f"{path} is of type list, expected an object"
    path.unlink()
    with pytest.raises(AlignmentError) as caught:
        load_batches(tmp_path)
    assert str(caught.value) == f"{path} cannot be read: No such file or directory"


def test_a_failed_runs_own_error_is_read_where_it_wrote_one(tmp_path: Path) -> None:
    assert load_failure(tmp_path) is None
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"type": "ConfigError", "message": "no", "exit_code": 5, "global_rank": 0}))
    assert load_failure(tmp_path) == RunFailure(exit_code=5, message="ConfigError: no")
    path.write_text(json.dumps({"type": "ConfigError", "exit_code": "5"}))
    with pytest.raises(AlignmentError) as caught:
        load_failure(tmp_path)
    assert str(caught.value) == f"{path}: message is missing; exit_code is '5', expected an integer"
