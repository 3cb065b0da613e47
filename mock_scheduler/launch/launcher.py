"""A launcher starts a run with the command, environment and processes of its configuration, and waits for it.

Contract: importing this module imports no torch. A run's processes are started and waited for by one of their own
(``launch.ranks``). All of them end with the launcher: on Ctrl-C, SIGTERM and SIGHUP they are asked to and waited for;
on Linux they also end when it is killed, with their helpers and in whatever session those are.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mock_scheduler.config.variables import RANK_VARIABLES, find_variable_problems
from mock_scheduler.determinism.environment import launch_environment
from mock_scheduler.errors import ConfigError
from mock_scheduler.launch.kernel_cache import claim_kernel_cache
from mock_scheduler.launch.meeting import STORE_VARIABLE
from mock_scheduler.launch.ranks import LISTENER_VARIABLE, Place, ranks_command
from mock_scheduler.launch.supervision import GRACE_S, write_error
from mock_scheduler.launch.warm_start import ForkedProcess, WarmStarts
from mock_scheduler.program import RunConfig
from mock_scheduler.support.processes import (
    PARENT_VARIABLE,
    describe_signal,
    ending_signals_as_interrupt,
    meant_exit_code,
    remove_left_service_file,
)
from mock_scheduler.support.terminal_streams import print_message
from mock_scheduler.support.text import bullet_list

# What another launcher around this one may have left in the environment; a run must not take it for its own.
_RANK_VARIABLES = RANK_VARIABLES | {"TORCHELASTIC_RUN_ID", STORE_VARIABLE, LISTENER_VARIABLE}
# Of every run, so that those of one rank and of several can be forked from one process (``launch.warm_start``).
_OWN = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
# The supervisor gives its ranks less before it kills them itself.
_GRACE_S = GRACE_S + 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """Holds this node's part of a run.

    ``argv``: the command. ``env``: variables to set over the launcher's own. ``num_processes``: on this node;
    ``world_size``: on all nodes. ``output_dir``: where the run's ``error.json`` goes if a signal ends it; ``None``:
    nowhere. ``preload``: the modules of others that a process to fork this run from has imported.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    num_processes: int
    world_size: int
    output_dir: Path | None = None
    preload: tuple[str, ...] = ()


#: The process that starts this machine's ranks: new, or forked.
_Process = subprocess.Popen[bytes] | ForkedProcess


class RunningProcesses:
    """The processes of waiting threads, kept so that another thread can end them."""

    def __init__(self) -> None:
        self._processes: set[_Process] = set()
        self._is_over = False

    @contextmanager
    def holding(self, process: _Process) -> Iterator[None]:
        """Count a process among them while the block waits for it."""
        self._processes.add(process)
        try:
            if self._is_over:
                _end_group(process)
            yield
        finally:
            self._processes.discard(process)

    def end(self) -> None:
        """End all of them, and those that start yet; the main thread calls it when it is interrupted."""
        self._is_over = True
        for process in tuple(self._processes):
            _end_group(process)


def plan_launch(
    config: RunConfig,
    arguments: Sequence[str],
    *,
    num_processes: int | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    rdzv_endpoint: str | None = None,
    python: str = sys.executable,
) -> LaunchPlan:
    """Plans one node's part of a run.

    ``config``: the run's. ``arguments``: of Python, as ``Program.arguments`` gives them. ``num_processes``: of all
    nodes, as ``Program.num_processes`` gives them; ``None``: one for each rank of the layout. With several nodes, each
    runs its own plan with the same ``rdzv_endpoint``, ``HOST:PORT`` on node 0, and global ranks follow ``node_rank``,
    so that two runs place them alike. Raises ``ConfigError`` where the processes of the layout do not divide over the
    nodes, or the node's rank or the endpoint do not fit.
    """
    world_size = config.parallel.world_size if num_processes is None else num_processes
    _check_nodes(config.parallel.describe(), world_size, nnodes=nnodes, node_rank=node_rank, endpoint=rdzv_endpoint)
    place = Place(num_local=world_size // nnodes, nnodes=nnodes, node_rank=node_rank, endpoint=rdzv_endpoint)
    return _plan(tuple(arguments), config, place=place, told_to=Path(config.output_dir), python=python)


def _plan(arguments: tuple[str, ...], config: RunConfig, *, place: Place, told_to: Path, python: str) -> LaunchPlan:
    _check_start(arguments, config)
    return LaunchPlan(
        argv=ranks_command(python, arguments, told_to=told_to, place=place),
        env=launch_environment(config.system_envs),
        num_processes=place.num_local,
        world_size=place.world_size,
        output_dir=told_to,
    )


def _check_start(arguments: tuple[str, ...], config: RunConfig) -> None:
    """Refuses what the loader of a program may have let pass; raises ``ConfigError``."""
    problems = [f"{key}: {text}" for key, text in find_variable_problems(config.system_envs)]
    if arguments[:1] != ("-m",) or len(arguments) == 1:
        problems.append(f"the program's arguments must begin with -m MODULE, found {' '.join(arguments) or 'none'}")
    if problems:
        raise ConfigError(f"cannot launch:{bullet_list(problems, limit=None)}")
    claim_kernel_cache({**os.environ, **config.system_envs})


def _check_nodes(layout: str, world_size: int, *, nnodes: int, node_rank: int, endpoint: str | None) -> None:
    problems = []
    if nnodes < 1 or world_size % nnodes:
        problems.append(f"layout {layout} needs {world_size} processes, which do not divide over --nnodes {nnodes}")
    if not 0 <= node_rank < max(nnodes, 1):
        problems.append(f"--node-rank {node_rank} is not in 0..{nnodes - 1} (--nnodes {nnodes})")
    if nnodes > 1 and (endpoint is None or not endpoint.rpartition(":")[2].isdecimal()):
        problems.append(f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT on node 0, found {endpoint!r}")
    if problems:
        raise ConfigError(f"cannot launch:{bullet_list(problems)}")


def child_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the whole environment of the plan's process.

    It is ``environ`` without another launcher's rank variables, and the plan's over it; ranks of several get one OpenMP
    thread each where nobody chose, as torchrun gives them.
    """
    inherited = {name: value for name, value in environ.items() if name not in _RANK_VARIABLES}
    several = {"OMP_NUM_THREADS": "1"} if plan.world_size > 1 else {}
    return {**_OWN, **several, **inherited, **plan.env}


def run_plan(
    plan: LaunchPlan,
    *,
    log_path: Path | None = None,
    cwd: Path | None = None,
    running: RunningProcesses | None = None,
    warm: WarmStarts | None = None,
    inherited: Sequence[int] = (),
) -> int:
    """Carries the plan out and returns its exit code; output goes to ``log_path``, or where this process's goes.

    ``warm`` starts it where it can; else it is a new process, which keeps the descriptors ``inherited`` open.
    ``running`` counts the process while it is waited for. A run ended by a signal has the code 128 + the signal's
    number; a run ended with Python's own 1 has 70. On Ctrl-C, SIGTERM or SIGHUP the child's process group is terminated
    and waited for, then KeyboardInterrupt is raised.
    """
    running = running or RunningProcesses()
    if log_path is None:
        return _run(plan, log=None, cwd=cwd, running=running, warm=warm, inherited=inherited)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return _run(plan, log=log, cwd=cwd, running=running, warm=warm, inherited=inherited)


def _run(
    plan: LaunchPlan,
    *,
    log: IO[bytes] | None,
    cwd: Path | None,
    running: RunningProcesses,
    warm: WarmStarts | None,
    inherited: Sequence[int],
) -> int:
    # Signals reach the main thread alone; it ends the processes of other threads with ``RunningProcesses.end``.
    is_main = threading.current_thread() is threading.main_thread()
    with ending_signals_as_interrupt() if is_main else nullcontext():
        process = _start(plan, log=log, cwd=cwd, warm=warm, inherited=inherited)
        with running.holding(process):
            try:
                code = process.wait()
            except BaseException:
                _end_group(process)
                raise
            finally:
                _end_rest(process)
    if plan.output_dir is not None:
        remove_left_service_file((cwd or Path()) / plan.output_dir)
    if code < 0:
        for line in _state_signal(plan, code, cwd=cwd):
            _print_line(line, log)
    return meant_exit_code(code)


def _start(
    plan: LaunchPlan, *, log: IO[bytes] | None, cwd: Path | None, warm: WarmStarts | None, inherited: Sequence[int]
) -> _Process:
    environ = {**child_environment(plan, os.environ), PARENT_VARIABLE: str(os.getpid())}
    if warm is not None:
        output = (1, 2) if log is None else (log.fileno(), log.fileno())
        forked = warm.start(plan.argv, preload=plan.preload, environ=environ, cwd=cwd, output=output)
        if forked is not None:
            return forked
    return subprocess.Popen(
        plan.argv,
        env=environ,
        cwd=cwd,
        stdout=log,
        stderr=subprocess.STDOUT if log else None,
        start_new_session=True,
        pass_fds=inherited,
    )


def _state_signal(plan: LaunchPlan, code: int, *, cwd: Path | None) -> list[str]:
    """Writes down a signal's end of the started process; returns the lines to say."""
    message = f"the process that started this machine's ranks was ended by {describe_signal(code)}"
    if plan.output_dir is None:
        return [message]
    return [message, *write_error(plan.output_dir, message, code=code, global_rank=None, cwd=cwd)]


def _print_line(text: str, log: IO[bytes] | None) -> None:
    if log is None:
        print_message(text)
    else:
        log.write(f"{text}\n".encode())
        log.flush()


def _end_group(process: _Process) -> None:
    """End the group that ``process`` leads: asked first, killed when the grace is over or at a second interrupt."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=_GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end_rest(process: _Process) -> None:
    """Kills the rest of the group that ``process`` led; there is one only where ``process`` itself was killed."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
