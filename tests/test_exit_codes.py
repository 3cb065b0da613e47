"""Whatever goes wrong, a command, script or module program ends with the one table's code for it, never a verdict's."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks import align as benchmark
from mock_scheduler import cli
from mock_scheduler.errors import SIGNAL_CODES, ExitCode

ROOT = Path(__file__).parents[1]
COMMANDS = [info.name or str(info.callback and info.callback.__name__) for info in cli.app.registered_commands]
#: A missing folder, recording or configuration in the place of each argument.
MISSING = {
    "launch": ["no_such"],
    "align": ["no_such"],
    "extract": ["no_such", "one", "-o", "out"],
    "minimise": ["no_such", "one"],
    "compare": ["no_such", "no_such"],
    "replicas": ["no_such"],
    "doctor": ["no_such"],
    "env": ["no_such"],
    "config": ["no_such"],
    "inspect": ["no_such"],
    "verify": ["no_such"],
    "diff": ["no_such", "no_such"],
    "show": ["no_such"],
    "correction": ["no_such"],
    "replay-actions": ["no_such", "no_such"],
    "import": ["slime", "no_such", "out"],
    "export": ["slime", "no_such", "out"],
    "plot": ["no_such"],
    "new": ["/dev/null/no_such"],
    "completion": ["no_such_shell"],
}
WITHOUT_INPUT = {"frameworks", "version"}
IN_A_PROCESS = {"export-hf"}  # the module that it starts is tests/pipelines/test_hf_runs.py's


def test_every_command_is_tried() -> None:
    assert sorted(COMMANDS) == sorted({*MISSING, *WITHOUT_INPUT, *IN_A_PROCESS})


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_input_and_missing_files_exit_with_5(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([command, "--no-such-option"]) == ExitCode.USAGE
    if command not in WITHOUT_INPUT:
        assert cli.main([command]) == ExitCode.USAGE
    if command in MISSING:
        assert cli.main([command, *MISSING[command]]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (KeyboardInterrupt(signal.SIGTERM), 143),
        (KeyboardInterrupt(signal.SIGHUP), 129),
        (RuntimeError("unforeseen"), 70),
        (PermissionError(13, "Permission denied", "file"), 5),
    ],
)
def test_an_interrupt_and_a_crash_have_codes_of_their_own(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> int:
        raise error

    monkeypatch.setattr("mock_scheduler.commands.frameworks.list_frameworks", fail)
    assert cli.main(["frameworks"]) == code
    assert ("error: interrupted" in capsys.readouterr().err) is isinstance(error, KeyboardInterrupt)


def test_the_table_has_each_code_once_with_its_meaning() -> None:
    assert [int(code) for code in ExitCode] == [0, 1, 2, 3, 4, 5, 70]
    assert all(code.meaning for code in ExitCode)
    assert set(SIGNAL_CODES) == {128 + number for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)}


def test_a_module_program_exits_with_5_for_a_wrong_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["align", "--no-such-option"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 5
    assert "unrecognized arguments: --no-such-option" in capsys.readouterr().err


def test_no_module_program_parses_with_argparse_itself() -> None:
    """It exits with 2 for a wrong option. ``recording_peers`` is a worker in an environment without this project."""
    files = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("launch/*.py"), *ROOT.glob("tests/faults/**/*.py")]
    wrong = [path.name for path in files if re.search(r"argparse\.ArgumentParser\(", path.read_text(encoding="utf-8"))]
    assert wrong == ["recording_peers.py"]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("multi_node.sh", ["quickstart"]), ("slurm.sbatch", ["quickstart"]), ("docs.sh", ["--site"])],
)
def test_a_script_exits_with_5_for_bad_input(script: str, arguments: list[str], tmp_path: Path) -> None:
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "launch" / "setup_venv.sh").write_text("")
    done = subprocess.run(["bash", f"launch/{script}", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith(("usage: ", "submit this file"))


@pytest.mark.parametrize("script", ["quickstart.sh", "train.sh", "test.sh", "ray.sh"])
def test_a_script_exits_with_5_where_pip_fails(script: str, tmp_path: Path) -> None:
    """pip's own code, 1, would be a verdict."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    for name in ("requirements.txt", "setup.py"):
        (tmp_path / name).touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 'no such package' >&2\nexit 1\n")
    python.chmod(0o755)
    done = subprocess.run(["bash", f"launch/{script}", "quickstart"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (5, "no such package\n")
