"""Reads the Python of a candidate: whether it can run it, and the versions of the packages with an effect on bits.

Contract: this process's own interpreter is read without starting anything. Another is started once, for a second or
two, and imports neither torch nor Megatron; an error of its own becomes a ``ConfigError`` with its words.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.text import bullet_list
from mock_scheduler.support.versions import PACKAGE, ROOT, read_all_versions, read_package_versions

_NEEDED = ("torch", "megatron-core")
_TIMEOUT_S = 120.0
_NUM_LINES = 15
#: The folder that this project is imported from.
_CHECKOUT = ROOT

# What the other interpreter runs. It finds the project as a rank would, installed or in PYTHONPATH; only where it does
# not, the checkout's folder is added. Reading a configuration is what every run begins with.
_PROBE = """
import importlib, importlib.util, json, os, platform, sys
packages, checkout = json.loads(sys.argv[1])
added = any(importlib.util.find_spec(name) is None for name in packages)
if added:
    sys.path.insert(0, checkout)
import mock_scheduler.config.loading, mock_scheduler.launch.launcher
from mock_scheduler.support.versions import read_all_versions, read_package_versions
for name in packages:
    importlib.import_module(name)
folders = [os.path.dirname(os.path.abspath(sys.modules[name].__file__)) for name in packages]
found = {"python": platform.python_version(), "added": added, "folders": folders}
print(json.dumps({**found, "versions": read_package_versions(), "installed": read_all_versions()}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """``path``: as it is started. ``versions``: of Python and of the packages with an effect on bits.

    ``packages``: the versions of all that are installed. ``env``: variables for a run under it, over
    the launcher's own. ``sources``: the folders of the project's packages under it.
    """

    path: str
    versions: Mapping[str, str]
    packages: Mapping[str, str]
    env: Mapping[str, str]
    sources: tuple[Path, ...]


@dataclass(slots=True)
class InterpreterReader:
    """Reads interpreters, each once.

    ``packages``: imported by a run beside the library. ``environ``: of the started processes; ``None``: this
    process's.
    """

    packages: tuple[str, ...] = ()
    environ: Mapping[str, str] | None = None
    _known: dict[str, Interpreter] = field(default_factory=dict)

    def read(self, python: str | None) -> Interpreter:
        """Returns the interpreter of a path, or of a name on the search path; ``None`` is this process's own.

        Raises ``ConfigError`` where it cannot be run, cannot import the project, or has no torch or no
        megatron-core.
        """
        path = sys.executable if python is None else find_executable(python)
        if path not in self._known:
            is_own = path == sys.executable
            packages = (PACKAGE, *self.packages)
            self._known[path] = _read_own(packages) if is_own else _probe(path, packages, self.environ or os.environ)
        return self._known[path]


def describe_versions(baseline: Mapping[str, str], candidate: Mapping[str, str]) -> tuple[str, ...]:
    """Lists a candidate's versions beside the baseline's where they differ, as ``torch 2.13.0 instead of 2.14.1``."""
    names = [name for name in dict.fromkeys([*baseline, *candidate]) if baseline.get(name) != candidate.get(name)]
    return tuple(
        f"{name} {candidate.get(name, 'not installed')} instead of {baseline.get(name, 'none')}" for name in names
    )


def find_executable(python: str) -> str:
    """Returns the absolute path of an interpreter, links kept: a virtual environment is told by where its link lies.

    Raises ``ConfigError`` where there is none, or it cannot be run.
    """
    path = Path(python).expanduser()
    found = shutil.which(str(path)) if path.name == str(path) else str(path.absolute())
    if found is None:
        raise ConfigError(f"python: there is no {python!r} on the search path")
    if not Path(found).is_file():
        raise ConfigError(f"python: there is no file {found}")
    if not os.access(found, os.X_OK):
        raise ConfigError(f"python: {found} cannot be executed; give an interpreter, as in /path/to/env/bin/python")
    return found


def _read_own(packages: Sequence[str]) -> Interpreter:
    found = read_package_versions()
    return Interpreter(
        path=sys.executable,
        versions=_named_versions(platform.python_version(), found),
        packages=read_all_versions(),
        env={},
        sources=tuple(Path(str(import_module(name).__file__)).parent for name in packages),
    )


def _probe(path: str, packages: Sequence[str], environ: Mapping[str, str]) -> Interpreter:
    given = json.dumps([packages, str(_CHECKOUT)])
    answer = _ask(path, given, environ)
    versions = _named_versions(answer["python"], answer["versions"])
    missing = [name for name in _NEEDED if name not in versions]
    if missing:
        raise ConfigError(f"python: {path} has no {' and no '.join(missing)}; install {' and '.join(missing)} there")
    env = {}
    if answer["added"]:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_CHECKOUT), environ.get("PYTHONPATH"))))
    folders = tuple(map(Path, answer["folders"]))
    return Interpreter(path=path, versions=versions, packages=answer["installed"], env=env, sources=folders)


def _ask(path: str, given: str, environ: Mapping[str, str]) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [path, "-P", "-c", _PROBE, given],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"python: {path} cannot be run: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()[-_NUM_LINES:] or ["(it wrote nothing to stderr)"]
        raise ConfigError(
            f"python: {path} cannot load a run of this project (exit code {done.returncode}); the last lines of its "
            f"stderr:{bullet_list(lines, limit=None)}"
        )
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise ConfigError(f"python: {path} is not a Python interpreter: it answered {done.stdout[:200]!r}") from error
    return answer


def _named_versions(python: str, found: Mapping[str, str | None]) -> dict[str, str]:
    return {"python": python, **{name: version for name, version in found.items() if version is not None}}
