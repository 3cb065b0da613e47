"""Programs that need torch and Megatron, each in a process of its own without a start of Python for each.

To import both takes seconds of a core, and most programs of the tests compute for less. A server imports them once for
each worker of a test run, computes nothing, and forks for every program: the program's process is as young as a new
one. ``python -m tests.programs`` is the server; ``run_program`` asks it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mock_scheduler.launch import ranks
from mock_scheduler.launch.ranks import Place, ranks_command
from mock_scheduler.support.loaded_code import find_own_files
from mock_scheduler.support.processes import end_process

ROOT = Path(__file__).parents[1]

#: What the launcher exports to a run of one process.
DETERMINISTIC = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}


def run_program(
    module: str, arguments: Sequence[str], *, environ: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m MODULE ARGUMENTS`` in one process, with ``environ`` over ``DETERMINISTIC``.

    What Python and torch read when they start is as in ``DETERMINISTIC``; ``environ`` changes what is read later.
    """
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        told, failed = Path(folder) / "stdout", Path(folder) / "stderr"
        request = {
            "module": module,
            "arguments": list(arguments),
            "environ": {**os.environ, "COLUMNS": "200", **DETERMINISTIC, **(environ or {})},
            "cwd": str(cwd),
            "stdout": str(told),
            "stderr": str(failed),
        }
        exit_code = _ask(request)
        return subprocess.CompletedProcess(
            [module, *arguments], exit_code, told.read_text(encoding="utf-8"), failed.read_text(encoding="utf-8")
        )


def run_ranks(
    num_ranks: int,
    module: str,
    arguments: Sequence[str],
    *,
    told_to: Path,
    environ: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Runs the ranks of a module as the launcher does, by ``launch.ranks``; where one fails, the others are ended.

    ``told_to``: the folder of the run, for ``error.json``.
    """
    argv = ranks_command("python", ("-m", module, *arguments), told_to=told_to, place=Place(num_local=num_ranks))
    return run_program(ranks.MODULE, argv[argv.index(ranks.MODULE) + 1 :], environ=environ, cwd=cwd)


def _ask(request: Mapping[str, object]) -> int:
    server = _start_server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())
    except BaseException:
        # The next program must not read this one's exit code.
        server.kill()
        _start_server.cache_clear()
        raise


@cache
def _start_server() -> subprocess.Popen[str]:
    """Starts this process's server, which ends when its standard input is closed."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.programs"],
        cwd=ROOT,
        env={**os.environ, **DETERMINISTIC},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end_server, server)
    return server


def _end_server(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.communicate()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """One program, as ``run_program`` sends it."""

    module: str
    arguments: list[str]
    environ: dict[str, str]
    cwd: str
    stdout: str
    stderr: str


def _serve() -> _Request | None:
    """Answers each request with an exit code; the fork for one returns it, and the server ``None`` at the end."""
    while line := sys.stdin.readline():
        # What waits in a buffer would be written by both.
        sys.stdout.flush()
        process_id = os.fork()
        if process_id == 0:
            return _Request(**json.loads(line))
        _, status = os.waitpid(process_id, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def _become(request: _Request) -> None:
    """Makes this process the program's: its files, folder, variables and arguments."""
    paths = {0: os.devnull, 1: request.stdout, 2: request.stderr}
    for number, path in paths.items():
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request.cwd)
    sys.path.insert(0, request.cwd)
    os.environ.clear()
    os.environ.update(request.environ)
    sys.argv[1:] = request.arguments


def _run(module: str) -> int:
    """Runs a module as the main one; returns the exit code that Python would end with."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
        return 1
    return 0


def _main() -> None:
    gc.disable()  # all that is imported stays
    # Imported by the server alone: whoever asks it needs no torch.
    import torch

    import pipelines.run
    from pipelines.config.loading import load_config

    modules: dict[str, Any] = {"torch": torch, "pipelines": pipelines.run}
    find_own_files()  # each run asks for them twice
    load_config("quickstart")  # readies Hydra, and reads the shipped files
    assert len(os.listdir("/proc/self/task")) == 1, f"an import of {list(modules)} started a thread"
    gc.freeze()  # a collection in a fork would copy the memory that it looks at
    gc.set_threshold(50_000)  # in place of 700: few programs leave garbage
    gc.enable()
    request = _serve()
    if request is not None:
        _become(request)
        end_process(_run(request.module))


if __name__ == "__main__":
    _main()
