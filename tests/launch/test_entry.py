"""An entry is found where the user put it, and no other file of the working directory is ever imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import pipelines.agentic
from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.errors import ConfigError
from mock_scheduler.launch.entry import check_entry, find_module, run_script
from mock_scheduler.launch.ranks import Place, ranks_command

RAN = "import os, pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()\nraise ImportError('not this one')\n"


def run_ranks(folder: Path, module: str, *arguments: str, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """The exit code and the output of one rank that runs a module in a folder."""
    command = ranks_command(sys.executable, ("-m", module, *arguments), told_to="out", place=Place(num_local=1))
    return run(folder, command, environ=environ)


def run(folder: Path, command: Sequence[str], *, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **(environ or {})}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def write(folder: Path, names: Sequence[str], text: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


# A module that is installed, one of Python, one that Python looks for when it starts, one that a package asks for in
# vain, and one of this project.
SHADOWS = ("typing_extensions.py", "json.py", "ctypes.py", "sitecustomize.py", "usercustomize.py", "apex/__init__.py")


def test_a_module_of_the_working_directory_shadows_nothing(tmp_path: Path) -> None:
    """The command line of a run in a folder that somebody sent imported its ``typing_extensions.py``."""
    write(tmp_path, [*SHADOWS, "pipelines/__init__.py", "mock_scheduler/__init__.py"], RAN)
    code, said = run_ranks(tmp_path, "pipelines.agentic", "--config-name", "nothing", "--config-path", str(tmp_path))
    assert code == 5
    assert said.startswith("[rank 0] ConfigError: no configuration 'nothing' in ")
    assert list(tmp_path.rglob("*.ran")) == []


OWN = """\
import importlib.util, json, sys
import typing_extensions
import beside
print(json.__file__ == sys.argv[1], "site-packages" in typing_extensions.__file__, beside.VALUE, sys.argv[2:])
print(sys.path[-1] == sys.argv[3], __name__, importlib.util.find_spec("typing_extensions") is not None)
"""


def test_an_entry_of_the_working_directory_is_found_with_the_modules_beside_it(tmp_path: Path) -> None:
    """The project's own modules come last, so that even then nothing of the folder stands before another's."""
    import json

    write(tmp_path, SHADOWS, RAN)
    write(tmp_path, ["beside.py"], "VALUE = 7\n")
    write(tmp_path, ["own_entry.py"], OWN)
    code, said = run_ranks(tmp_path, "own_entry", str(json.__file__), "a.b=c", str(tmp_path))
    assert (code, said.splitlines()) == (0, [f"True True 7 ['a.b=c', '{tmp_path}']", "True __main__ True"])
    assert list(tmp_path.rglob("*.ran")) == []


def test_an_entry_of_pythonpath_comes_before_one_of_the_working_directory(tmp_path: Path) -> None:
    here, chosen = tmp_path / "here", tmp_path / "chosen"
    write(here, ["own_entry.py", "other.py"], "print('here')\n")
    write(chosen, ["own_entry.py"], "print('chosen')\n")
    assert run_ranks(here, "own_entry") == (0, "here\n")
    assert run_ranks(here, "own_entry", environ={"PYTHONPATH": str(chosen)}) == (0, "chosen\n")
    assert run_ranks(here, "other", environ={"PYTHONPATH": str(chosen)}) == (0, "here\n")


def test_an_entry_that_is_nowhere_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = (
        "entry: there is no Python module 'no_entry.x' among the installed packages, in PYTHONPATH or in the working "
        f"directory {tmp_path}; install it, or name its folder in PYTHONPATH"
    )
    assert run_ranks(tmp_path, "no_entry.x") == (5, f"error: {message}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check_entry("no_entry.x")
    assert str(caught.value) == message


def test_the_file_behind_an_entry_is_found_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, ["own/__init__.py", "own/part.py", "own/__main__.py", "spaced/deep/entry.py"], RAN)
    write(tmp_path, ["pipelines/agentic.py", "pipelines/new.py"], RAN)
    monkeypatch.chdir(tmp_path)
    assert find_module("own.part") == tmp_path / "own/part.py"
    assert find_module("own") == tmp_path / "own/__main__.py"
    assert find_module("spaced.deep.entry") == tmp_path / "spaced/deep/entry.py"
    assert find_module("own.missing") is None
    assert find_module("own.part.deeper") is None
    assert find_module("spaced") is None
    assert find_module("pipelines.agentic") == Path(pipelines.agentic.__file__)
    assert find_module("pipelines.new") is None  # the installed package hides it, as it would from Python
    assert list(tmp_path.rglob("*.ran")) == []


def test_a_replay_of_actions_starts_as_safely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mock_scheduler.commands.launch import run_replay_actions

    write(tmp_path, ["typing_extensions.py", "json.py"], RAN)
    write(tmp_path, ["plays.py"], "import sys, json, typing_extensions\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    source = ConfigSource(config_name="x", config_path=str(tmp_path))
    assert run_replay_actions(source, "recording", steps=None, json_path=None, entry="plays") == 3
    assert list(tmp_path.rglob("*.ran")) == []


def test_a_script_has_its_absolute_path_as_python_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script finds what lies beside it by ``Path(__file__).parents``, which a relative path has not."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "train.py").write_text(
        "import sys; from pathlib import Path\n"
        "Path('said').write_text(repr((__file__, str(Path(__file__).parents[1]), sys.argv[1:])))\n"
    )
    monkeypatch.chdir(tmp_path / "inner")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    run_script("train.py", ["--lr", "1"])
    expected = (str(tmp_path / "inner" / "train.py"), str(tmp_path), ["--lr", "1"])
    assert (tmp_path / "inner" / "said").read_text() == repr(expected)
