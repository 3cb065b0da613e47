"""Interpreters of candidates: real processes, of this environment behind scripts that change it."""

import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest

import mock_scheduler
from mock_scheduler.alignment.plan.interpreters import InterpreterReader, describe_versions, find_executable
from mock_scheduler.errors import ConfigError

PACKAGES = ("pipelines",)
CHECKOUT = Path(mock_scheduler.__file__).parents[1]
# Takes the project away from an environment that has it, as one where it was never installed.
HIDE = f"""
import sys
sys.path[:] = [path for path in sys.path if path != {str(CHECKOUT)!r}]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
"""


def write_script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return path


def refusal(python: str | Path) -> str:
    with pytest.raises(ConfigError) as caught:
        InterpreterReader(packages=PACKAGES).read(str(python))
    return str(caught.value)


def test_this_interpreter_is_read_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", lambda *arguments, **options: pytest.fail("a process was started"))
    found = InterpreterReader(packages=PACKAGES).read(None)
    assert found.path == sys.executable
    assert found.versions["python"] == platform.python_version()
    assert found.versions["torch"] == metadata.version("torch")
    assert found.versions["megatron-core"] == metadata.version("megatron-core")
    assert found.sources == (CHECKOUT / "mock_scheduler", CHECKOUT / "pipelines")
    assert InterpreterReader(packages=PACKAGES).read(sys.executable) == found


def test_an_environment_without_the_project_is_given_this_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HIDE)
    script = write_script(
        tmp_path / "python",
        f"echo started >> {tmp_path / 'log'}",
        f'PYTHONPATH={tmp_path / "site"}:$PYTHONPATH exec {sys.executable} "$@"',
    )
    monkeypatch.chdir(tmp_path)
    reader = InterpreterReader(packages=PACKAGES, environ={"PATH": "/usr/bin:/bin", "PYTHONPATH": "/other"})
    found = reader.read(str(script))
    assert found.path == str(script)
    assert found.env == {"PYTHONPATH": f"{CHECKOUT}:/other"}
    assert found.versions == InterpreterReader(packages=PACKAGES).read(None).versions
    assert found.sources == (CHECKOUT / "mock_scheduler", CHECKOUT / "pipelines")
    assert reader.read(str(script)) == found
    assert (tmp_path / "log").read_text() == "started\n"  # once for both


def test_an_environment_without_what_the_project_needs_is_refused_with_its_own_words(tmp_path: Path) -> None:
    script = write_script(tmp_path / "python", f'exec {sys.executable} -S "$@"')
    message = refusal(script)
    assert message.startswith(
        f"python: {script} cannot load a run of this project (exit code 1); the last lines of its stderr:\n  - "
    )
    assert "ModuleNotFoundError: No module named " in message


def test_an_environment_without_torch_is_refused(tmp_path: Path) -> None:
    answer = '{"python": "3.12.1", "added": false, "versions": {"torch": null, "numpy": "2.0"}, "folders": []}'
    script = write_script(tmp_path / "python", f"echo '{answer}'")
    assert refusal(script) == (
        f"python: {script} has no torch and no megatron-core; install torch and megatron-core there"
    )


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    script = write_script(tmp_path / "hello", "echo hello")
    assert refusal(script) == f"python: {script} is not a Python interpreter: it answered 'hello\\n'"
    silent = write_script(tmp_path / "silent", "exit 3")
    assert refusal(silent).endswith("(exit code 3); the last lines of its stderr:\n  - (it wrote nothing to stderr)")
    text = tmp_path / "text"
    text.write_text("print(1)")
    assert refusal(text) == (f"python: {text} cannot be executed; give an interpreter, as in /path/to/env/bin/python")
    assert refusal(tmp_path / "none") == f"python: there is no file {tmp_path / 'none'}"
    assert refusal("no-such-python") == "python: there is no 'no-such-python' on the search path"


def test_a_link_into_an_environment_stays_a_link(tmp_path: Path) -> None:
    """A virtual environment is told by the folder of the link; resolved, it would be the system's Python."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert find_executable(str(link)) == str(link)


def test_versions_that_differ_are_named() -> None:
    before = {"python": "3.11.2", "torch": "2.13.0", "triton": "3.7"}
    after = {"python": "3.11.2", "torch": "2.14.1", "transformer-engine": "2.19"}
    assert describe_versions(before, after) == (
        "torch 2.14.1 instead of 2.13.0",
        "triton not installed instead of 3.7",
        "transformer-engine 2.19 instead of none",
    )
