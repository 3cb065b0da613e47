"""``mock-scheduler new`` writes a folder whose alignment is planned as its page says, and touches no other folder."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from mock_scheduler import cli
from mock_scheduler.alignment.plan.plan import plan_alignment
from mock_scheduler.command_program.loading import build_loader
from mock_scheduler.command_program.program import PROGRAM


def test_the_folder_is_planned_by_its_own_first_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "my start/here"]) == 0
    said = capsys.readouterr().out
    folder = tmp_path / "my start/here"
    assert sorted(path.name for path in folder.iterdir()) == ["align.yaml", "my_kernel.py", "train.py"]
    assert f"cd {shlex.quote('my start/here')} && mock-scheduler align align.yaml" in said
    plan = plan_alignment(build_loader("align", folder), program=PROGRAM, overrides=[], output_dir=folder / "out")
    assert [(run.name, run.config.parallel.describe()) for run in plan.candidates] == [
        ("again", "tp1 pp1 dp1"),
        ("tp2", "tp2 pp1 dp1"),
        ("my-kernel", "tp1 pp1 dp1"),
    ]
    assert [run.must_be_exact for run in plan.candidates] == [True, True, False]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full", "full is not empty: it holds a, b, c, and 1 more; name a folder that does not exist yet"),
        ("full/a", "full/a is a file; name a folder that does not exist yet"),
        ("full/a/b", "full/a/b cannot be made: Not a directory; name a folder where you may write"),
    ],
)
def test_a_folder_in_use_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    for file in "abcd":
        (tmp_path / "full" / file).touch()
    assert cli.main(["new", name]) == 5
    assert capsys.readouterr().err == f"error: {message}\n"
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == ["a", "b", "c", "d"]
