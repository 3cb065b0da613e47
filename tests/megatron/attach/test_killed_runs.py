"""A run of an attached training that is killed at any moment leaves nothing torn, and nothing that says it is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_program


@pytest.mark.all
@pytest.mark.timeout(1800)
def test_two_hundred_attached_runs_that_are_killed_leave_nothing_torn(tmp_path: Path) -> None:
    done = run_program("tests.megatron.attach.killed_runs", (str(tmp_path / "runs"), "1", "200"))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[:-1] == []
    assert lines[-1].startswith("kills: 200, ")
