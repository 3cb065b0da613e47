"""A launcher starts a run with the command, environment and processes of its configuration, and waits for it.

Contract: importing this module imports no torch. One process is started directly, several through torchrun, and it
picks a free rendezvous port itself. A child's whole process group ends with the launcher: on Ctrl-C, SIGTERM and SIGHUP
it is asked to and waited for; on Linux every process also ends with its killed parent.

``python -m mock_scheduler.launch.launcher OUTPUT_DIR ...`` is torchrun with two differences: it exits with the failed
rank's own code, not always with 1, and leaves the last word to the rank's message, not to a traceback of torchrun. It
names a rank ended by a signal, on stderr and in the run's ``error.json``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mock_scheduler.determinism.environment import launch_environment
from mock_scheduler.errors import ConfigError
from mock_scheduler.launch.sessions import STATUS_FILE, SessionRun, check_session, find_running, write_plan
from mock_scheduler.program import Program, RunConfig, load_config
from mock_scheduler.support.processes import (
    PARENT_VARIABLE,
    RankExit,
    describe_signal,
    end_with_parent,
    ending_signals_as_interrupt,
    find_culprit,
    meant_exit_code,
    remove_left_service_file,
    write_signal_error,
)
from mock_scheduler.support.text import bullet_list

# What another launcher around this one may have left in the environment; a run must not take it for its own.
_RANK_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"}
    | {"MASTER_PORT", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID"}
)
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
# torchrun gives its ranks this long before it kills them itself (torch 2.13, elastic multiprocessing: 30 s).
_GRACE_S = 40.0
_WATCH_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """This node's part of a run.

    ``argv``: the command. ``env``: variables to set over the launcher's own. ``num_processes``: on this node;
    ``world_size``: on all nodes. ``output_dir``: where the run's ``error.json`` goes if a signal ends it; of several
    runs the plan's file, since it leads to the running one; ``None``: nowhere.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    num_processes: int
    world_size: int
    output_dir: Path | None = None


class RunningProcesses:
    """The processes of waiting threads, kept so that another thread can end them."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()

    @contextmanager
    def holding(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Count a process among them while the block waits for it."""
        self._processes.add(process)
        try:
            yield
        finally:
            self._processes.discard(process)

    def end(self) -> None:
        """End all of them; the main thread calls it when it is interrupted."""
        for process in tuple(self._processes):
            _end_group(process)


def plan_launch(
    config: RunConfig,
    arguments: Sequence[str],
    *,
    nnodes: int = 1,
    node_rank: int = 0,
    rdzv_endpoint: str | None = None,
    python: str = sys.executable,
) -> LaunchPlan:
    """Plans one node's part of a run.

    ``config``: the run's. ``arguments``: of Python, as ``Program.arguments`` gives them. With several nodes, each runs
    its own plan with the same ``rdzv_endpoint``, ``HOST:PORT`` on node 0, and global ranks follow ``node_rank``, so
    that two runs place them alike. Raises ``ConfigError`` where the processes of the layout do not divide over the
    nodes, or the node's rank or the endpoint do not fit.
    """
    world_size = config.parallel.world_size
    _check_nodes(config.parallel.describe(), world_size, nnodes=nnodes, node_rank=node_rank, endpoint=rdzv_endpoint)
    num_processes = world_size // nnodes
    rendezvous = _rendezvous(nnodes=nnodes, node_rank=node_rank, endpoint=rdzv_endpoint)
    torchrun = ("--nproc-per-node", str(num_processes), "--nnodes", str(nnodes), *rendezvous)
    argv, env = _start(tuple(arguments), config, torchrun=torchrun, told_to=config.output_dir, python=python)
    return LaunchPlan(
        argv=argv,
        env=env,
        num_processes=num_processes,
        world_size=world_size,
        output_dir=Path(config.output_dir),
    )


def plan_session(
    runs: Sequence[SessionRun],
    *,
    program: Program,
    plan_path: Path | None = None,
    python: str = sys.executable,
    entry: str | None = None,
) -> LaunchPlan:
    """Plans several runs one after another in one process group on this machine.

    Writes the plan for ``entry`` (``None``: the program's own) to ``plan_path`` (``None``: ``session.json``
    beside the first run's ``output_dir``) and removes the statuses of an earlier session of these runs. Raises
    ``ConfigError`` where there is no run, the program has no module for sessions, or the runs cannot share processes
    (``check_session``).
    """
    if not runs:
        raise ConfigError("a session needs at least one run")
    module = entry or program.session_entry
    if module is None:
        raise ConfigError(f"runs of {program.entry} cannot share processes: it has no module for sessions")
    configs = [load_config(run.source, program) for run in runs]
    check_session(runs, configs)
    path = (plan_path or runs[0].output_dir.parent / STATUS_FILE).absolute()
    write_plan(path, runs)
    world_size = configs[0].parallel.world_size
    rendezvous = _rendezvous(nnodes=1, node_rank=0, endpoint=None)
    torchrun = ("--nproc-per-node", str(world_size), "--nnodes", "1", *rendezvous)
    argv, env = _start(("-m", module, str(path)), configs[0], torchrun=torchrun, told_to=str(path), python=python)
    return LaunchPlan(argv=argv, env=env, num_processes=world_size, world_size=world_size, output_dir=path)


def _start(
    arguments: tuple[str, ...], config: RunConfig, *, torchrun: tuple[str, ...], told_to: str, python: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns the command and variables of Python for ``config``: alone, or through torchrun."""
    env = launch_environment(config.system_envs)
    if config.parallel.world_size == 1:
        return (python, *arguments), env | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    return (python, "-m", "mock_scheduler.launch.launcher", told_to, *torchrun, *arguments), env


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


def _rendezvous(*, nnodes: int, node_rank: int, endpoint: str | None) -> tuple[str, ...]:
    """Alone, torchrun binds a free port itself; over several nodes ``static`` keeps ranks in the order of nodes.

    The ``c10d`` backend would number nodes as they arrive, and two runs could sum over hosts in another order.
    """
    if endpoint is None:
        return ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", uuid.uuid4().hex)
    if nnodes == 1:
        return ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", uuid.uuid4().hex)
    return ("--rdzv-backend", "static", "--rdzv-endpoint", endpoint, "--node-rank", str(node_rank))


def child_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the whole environment of the plan's process.

    It is ``environ`` without another launcher's rank variables, and the plan's over it; ranks of several get one OpenMP
    thread each where nobody chose, as torchrun would set with a warning.
    """
    inherited = {name: value for name, value in environ.items() if name not in _RANK_VARIABLES}
    threads = {"OMP_NUM_THREADS": "1"} if plan.world_size > 1 else {}
    return {**_QUIET, **threads, **inherited, **plan.env}


def run_plan(
    plan: LaunchPlan,
    *,
    log_path: Path | None = None,
    cwd: Path | None = None,
    watch: Callable[[], None] | None = None,
    running: RunningProcesses | None = None,
) -> int:
    """Carries the plan out and returns its exit code; output goes to ``log_path``, or where this process's goes.

    ``watch`` is called about once a second while the run goes on, by this thread; an error of it ends the run.
    ``running`` counts the process while it is waited for. A run ended by a signal has the code 128 + the signal's
    number; a run ended with Python's own 1 has 70. On Ctrl-C, SIGTERM or SIGHUP the child's process group is
    terminated and waited for, then KeyboardInterrupt is raised.
    """
    running = running or RunningProcesses()
    if log_path is None:
        return _run(plan, log=None, cwd=cwd, watch=watch, running=running)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return _run(plan, log=log, cwd=cwd, watch=watch, running=running)


def _run(
    plan: LaunchPlan,
    *,
    log: IO[bytes] | None,
    cwd: Path | None,
    watch: Callable[[], None] | None,
    running: RunningProcesses,
) -> int:
    # Signals reach the main thread alone; it ends the processes of other threads with ``RunningProcesses.end``.
    is_main = threading.current_thread() is threading.main_thread()
    with ending_signals_as_interrupt() if is_main else nullcontext():
        process = subprocess.Popen(
            plan.argv,
            env={**child_environment(plan, os.environ), PARENT_VARIABLE: str(os.getpid())},
            cwd=cwd,
            stdout=log,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,
        )
        with running.holding(process):
            try:
                code = process.wait() if watch is None else _wait_watching(process, watch)
            except BaseException:
                _end_group(process)
                raise
    if plan.output_dir is not None:
        remove_left_service_file((cwd or Path()) / plan.output_dir)
    if code < 0:
        for line in _state_signal(plan, code, cwd=cwd):
            _print_line(line, log)
    return meant_exit_code(code)


def _wait_watching(process: subprocess.Popen[bytes], watch: Callable[[], None]) -> int:
    while True:
        try:
            return process.wait(timeout=_WATCH_S)
        except subprocess.TimeoutExpired:
            watch()


def _state_signal(plan: LaunchPlan, code: int, *, cwd: Path | None) -> list[str]:
    """Writes down a signal's end of the started process; returns the lines to say."""
    is_rank = plan.world_size == 1
    subject = "rank 0" if is_rank else "torchrun, which ran this machine's ranks,"
    message = f"{subject} was ended by {describe_signal(code)}"
    if plan.output_dir is None:
        return [message]
    return [message, *_write_error(plan.output_dir, message, code=code, global_rank=0 if is_rank else None, cwd=cwd)]


def _write_error(
    told_to: Path, message: str, *, code: int, global_rank: int | None, cwd: Path | None = None
) -> list[str]:
    """Writes a signal's end to the folder of the run, or of the ended one of a session; returns lines to say."""
    folder: Path | None = (cwd or Path()) / told_to
    if told_to.is_absolute() and told_to.is_file():
        folder = find_running(told_to)
    problem = None if folder is None else write_signal_error(folder, message, code=code, global_rank=global_rank)
    return [] if problem is None else [problem]


def _print_line(text: str, log: IO[bytes] | None) -> None:
    if log is None:
        print(text, file=sys.stderr, flush=True)
    else:
        log.write(f"{text}\n".encode())
        log.flush()


def _end_group(process: subprocess.Popen[bytes]) -> None:
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


def main(arguments: Sequence[str]) -> int:
    """torchrun with all arguments but the first, where the run is told of a signal (``LaunchPlan.output_dir``).

    Returns the meant code of the failed ranks.
    """
    end_with_parent(os.environ)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    # Only the process that runs torchrun pays for torch; whoever plans a launch does not.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    output_dir, *torchrun_arguments = arguments
    try:
        run(parse_args(torchrun_arguments))
    except ChildFailedError as error:
        failures = [
            RankExit(global_rank=global_rank, code=failure.exitcode, noticed_s=failure.timestamp)
            for global_rank, failure in error.failures.items()
        ]
        return report_failed_ranks(failures, Path(output_dir))
    except SignalException as error:
        return meant_exit_code(-int(error.sigval))
    return 0


def report_failed_ranks(failures: Sequence[RankExit], output_dir: Path) -> int:
    """Names a rank ended by a signal, where it is the cause; returns the exit code of the cause."""
    culprit = find_culprit(failures)
    if culprit.code < 0:
        message = f"rank {culprit.global_rank} was ended by {describe_signal(culprit.code)}"
        print(message, file=sys.stderr, flush=True)
        for problem in _write_error(output_dir, message, code=culprit.code, global_rank=culprit.global_rank):
            print(problem, file=sys.stderr, flush=True)
    return meant_exit_code(culprit.code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
