"""A program that the server forks for is one that Python started: its exit code, its output, and nobody's leftovers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_program, run_ranks

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


def test_ranks_have_their_places_and_end_with_one_that_fails(folder: Path) -> None:
    (folder / "ranks.py").write_text(
        "import os, sys, time\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)\n"
        "if sys.argv[1:]: sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)\n",
        encoding="utf-8",
    )
    done = run_ranks(2, "ranks", [], told_to=folder, cwd=folder)
    assert (done.returncode, sorted(done.stdout.splitlines()), done.stderr) == (0, ["0 2", "1 2"], "")
    assert run_ranks(2, "ranks", ["fail"], told_to=folder, cwd=folder).returncode == 7


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
