"""A program that the server forks for is one that Python started: its exit code, its output, and nobody's leftovers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_program

PROGRAM = """\
import atexit, os, sys, threading
import torch
print(__name__, sys.argv[1:], os.environ["PLACE"], os.getcwd(), hasattr(torch, "left_over"))
torch.left_over = True
atexit.register(print, "at exit")
threading.Thread(target=lambda: print("from a thread")).start()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of ``program.py``."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path


def test_a_program_has_its_arguments_variables_and_folder_and_no_others_state(folder: Path) -> None:
    for number in ("1", "2"):
        done = run_program("program", [number], environ={"PLACE": "here"}, cwd=folder)
        first, *others = done.stdout.splitlines()
        assert (done.returncode, done.stderr) == (0, "")
        assert first == f"__main__ ['{number}'] here {folder} False"
        assert sorted(others) == ["at exit", "from a thread"]


@pytest.mark.parametrize(
    ("ending", "exit_code", "error"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(5)", 5, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("raise ValueError('no')", 1, "ValueError: no\n"),
        ("os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_a_program_ends_as_python_lets_it_end(folder: Path, ending: str, exit_code: int, error: str) -> None:
    with (folder / "program.py").open("a", encoding="utf-8") as program:
        program.write(f"{ending}\n")
    done = run_program("program", [], environ={"PLACE": ""}, cwd=folder)
    assert done.returncode == exit_code
    assert done.stderr.endswith(error)
    assert bool(done.stderr) == bool(error)
