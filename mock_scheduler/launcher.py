"""Starting a run: the command, environment and number of processes of a configuration, and carrying it out.

Contract: importing this module imports no torch. One process is started directly, several through torchrun, which
picks a free rendezvous port itself. A child's whole process group ends with the launcher: on Ctrl-C and on SIGTERM.

``python -m mock_scheduler.launcher`` is torchrun with two differences: it exits with the failed rank's own code, not
always with 1, and leaves the last word to the rank's message, not to a traceback of torchrun.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.config.schema import PipelineConfig
from mock_scheduler.determinism.environment import launch_environment
from mock_scheduler.errors import ConfigError

DEFAULT_ENTRY = "pipelines.agentic"

# What another launcher around this one may have left in the environment; a run must not take it for its own.
_RANK_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"}
    | {"MASTER_PORT", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID"}
)
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
# torchrun gives its ranks this long before it kills them itself (torch 2.13, elastic multiprocessing: 30 s).
_GRACE_S = 40.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """How to start this node's part of a run.

    ``argv``: the command. ``env``: variables to set over the launcher's own.
    ``num_processes``: on this node; ``world_size``: on all nodes.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    num_processes: int
    world_size: int


def plan_launch(
    config: PipelineConfig,
    *,
    config_name: str,
    config_path: str,
    overrides: Sequence[str],
    entry: str = DEFAULT_ENTRY,
    nnodes: int = 1,
    node_rank: int = 0,
    rdzv_endpoint: str | None = None,
    python: str = sys.executable,
) -> LaunchPlan:
    """The plan for one node. ``config`` is what ``config_name``, ``config_path`` and ``overrides`` load to.

    With several nodes, each runs its own plan with the same ``rdzv_endpoint``, ``HOST:PORT`` on node 0, and global
    ranks follow ``node_rank``, so that two runs place them alike. Raises ConfigError where the processes of the
    layout do not divide over the nodes, or the node's rank or the endpoint do not fit.
    """
    world_size = config.parallel.world_size
    _check_nodes(config.parallel.describe(), world_size, nnodes=nnodes, node_rank=node_rank, endpoint=rdzv_endpoint)
    num_processes = world_size // nnodes
    source = ConfigSource(config_name=config_name, config_path=config_path, overrides=tuple(overrides))
    program = ("-m", entry, *source.arguments())
    env = launch_environment(config.system_envs)
    if world_size == 1:
        argv = (python, *program)
        env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    else:
        rendezvous = _rendezvous(nnodes=nnodes, node_rank=node_rank, endpoint=rdzv_endpoint)
        torchrun = ("-m", "mock_scheduler.launcher", "--nproc-per-node", str(num_processes), "--nnodes", str(nnodes))
        argv = (python, *torchrun, *rendezvous, *program)
    return LaunchPlan(argv=argv, env=env, num_processes=num_processes, world_size=world_size)


def _check_nodes(layout: str, world_size: int, *, nnodes: int, node_rank: int, endpoint: str | None) -> None:
    problems = []
    if nnodes < 1 or world_size % nnodes:
        problems.append(f"layout {layout} needs {world_size} processes, which do not divide over --nnodes {nnodes}")
    if not 0 <= node_rank < max(nnodes, 1):
        problems.append(f"--node-rank {node_rank} is not in 0..{nnodes - 1} (--nnodes {nnodes})")
    if nnodes > 1 and (endpoint is None or not endpoint.rpartition(":")[2].isdecimal()):
        problems.append(f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT on node 0, found {endpoint!r}")
    if problems:
        raise ConfigError("cannot launch:" + "".join(f"\n  - {problem}" for problem in problems))


def _rendezvous(*, nnodes: int, node_rank: int, endpoint: str | None) -> tuple[str, ...]:
    """Alone, torchrun binds a free port itself; over several nodes ``static`` keeps ranks in the order of nodes.

    The ``c10d`` backend would number nodes as they arrive, so that two runs could sum over hosts in another order.
    """
    if endpoint is None:
        return ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", uuid.uuid4().hex)
    if nnodes == 1:
        return ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", uuid.uuid4().hex)
    return ("--rdzv-backend", "static", "--rdzv-endpoint", endpoint, "--node-rank", str(node_rank))


def child_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the plan's process: ``environ`` without another launcher's rank variables, the plan's
    over it; ranks of several get one OpenMP thread each where nobody chose, as torchrun would set with a warning.
    """
    inherited = {name: value for name, value in environ.items() if name not in _RANK_VARIABLES}
    threads = {"OMP_NUM_THREADS": "1"} if plan.world_size > 1 else {}
    return {**_QUIET, **threads, **inherited, **plan.env}


def run_plan(plan: LaunchPlan, *, log_path: Path | None = None, cwd: Path | None = None) -> int:
    """Carry the plan out and return its exit code; stdout and stderr go to ``log_path``, or where this process's go.

    On Ctrl-C or SIGTERM the child's process group is terminated and waited for, then KeyboardInterrupt is raised.
    """
    if log_path is None:
        return _run(plan, log=None, cwd=cwd)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return _run(plan, log=log, cwd=cwd)


def _run(plan: LaunchPlan, *, log: IO[bytes] | None, cwd: Path | None) -> int:
    process = subprocess.Popen(
        plan.argv,
        env=child_environment(plan, os.environ),
        cwd=cwd,
        stdout=log,
        stderr=subprocess.STDOUT if log else None,
        start_new_session=True,
    )
    with _sigterm_as_interrupt():
        try:
            return process.wait()
        except KeyboardInterrupt:
            _end_group(process)
            raise


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the group that ``process`` leads: asked first, killed when the grace is over."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM (Slurm, timeouts) ends the child as Ctrl-C does."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def main(arguments: Sequence[str]) -> int:
    """torchrun with these arguments; the exit code that the failed ranks meant, 0 where none failed."""
    # Only the process that runs torchrun pays for torch; whoever plans a launch does not.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(list(arguments)))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return _meant_exit_code([failure.exitcode for failure in error.failures.values()])
    return 0


def _meant_exit_code(codes: Sequence[int]) -> int:
    """One code for several failed ranks: what a rank chose (2 and up) before 1, which is also what Python exits with
    when a peer breaks the connection, before a signal (negative), with which torchrun ends the others.
    """
    chosen = [code for code in codes if code > 1]
    return chosen[0] if chosen else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
