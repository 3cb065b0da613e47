"""A run of a command leaves its configuration; whoever receives the folder starts no command by it unasked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mock_scheduler import cli
from mock_scheduler.commands import launch as launch_command
from mock_scheduler.launch.launcher import LaunchPlan
from tests.command_program.simulated import Runs, write_config
from tests.command_program.test_align import FEW, align


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[LaunchPlan]:
    """The plans that would have been carried out."""
    plans: list[LaunchPlan] = []

    def note(plan: LaunchPlan) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(launch_command, "run_plan", note)
    return plans


def make_run(folder: Path) -> Path:
    """Returns the folder of a finished run."""
    align(write_config(folder, {"same": []}, align=FEW), Runs())
    return folder / "out" / "align" / "same"


@pytest.mark.parametrize("command", ["launch", "env", "align"])
def test_a_received_command_runs_only_when_asked_for(
    tmp_path: Path, started: list[LaunchPlan], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    received = tmp_path / "received"
    shutil.copytree(make_run(tmp_path), received)
    assert cli.main([command, str(received / "command.yaml")]) == 5
    told = capsys.readouterr().err
    assert "names what this would run or read:" in told
    assert "command: command = \"['{python}', 'fake_training.py'" in told
    assert "Nothing has run. If you trust whoever wrote this folder, add --run-stored-code" in told
    assert started == []


def test_a_received_command_runs_where_it_was_asked_for(
    tmp_path: Path, started: list[LaunchPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    received = tmp_path / "received"
    shutil.copytree(make_run(tmp_path), received)
    assert cli.main(["launch", str(received / "command"), "--run-stored-code"]) == 0
    assert "names what is used now:" in capsys.readouterr().err
    assert [plan.num_processes for plan in started] == [1]


def test_ones_own_command_runs_again_unasked(tmp_path: Path, started: list[LaunchPlan]) -> None:
    assert cli.main(["launch", str(make_run(tmp_path) / "command.yaml")]) == 0
    assert len(started) == 1
