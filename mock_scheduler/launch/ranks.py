"""One process starts this machine's ranks, waits for them and ends with their meaning.

``python -P -m mock_scheduler.launch.ranks TOLD_TO NUM_LOCAL NNODES NODE_RANK ENDPOINT -m MODULE ARGUMENTS``, as
``ranks_command`` writes it; a Python file may stand in the place of ``-m MODULE``, for a program of somebody else's.
Ranks are forked before anything but the standard library is imported, so each costs
nothing to start. They meet without a server on one machine: in a file of this process's memory, which no other user
can open and which ends with the processes. On several machines rank 0 listens at the endpoint that the user named.

Contract: imports no torch. A rank runs its module as ``python -P -m`` would, and a file as ``python`` would, with the
variables of a rank.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from mock_scheduler.errors import ConfigError
from mock_scheduler.launch.entry import check_entry, check_script, run_entry, run_script
from mock_scheduler.launch.meeting import STORE_VARIABLE, meet_in_memory
from mock_scheduler.launch.supervision import Supervision, block_signals, report_failed_ranks
from mock_scheduler.support.processes import PARENT_VARIABLE, adopt_orphans, end_with_parent, meant_exit_code
from mock_scheduler.support.terminal_streams import print_message

#: On several machines: the number of rank 0's descriptor that listens at the endpoint; empty for the other ranks.
LISTENER_VARIABLE = "MOCK_SCHEDULER_LISTENER"

#: Before the arguments of ``main`` in a command.
MODULE = "mock_scheduler.launch.ranks"
_NO_ENDPOINT, _IN_MEMORY = "-", "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Holds this machine's share of a run's ranks. ``endpoint``: ``HOST:PORT`` on node 0; of one machine ``None``.

    ``is_foreign``: the program knows torch alone, and meets by ``env://``; only on one machine.
    """

    num_local: int
    nnodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None
    is_foreign: bool = False

    @property
    def world_size(self) -> int:
        """Ranks on all machines."""
        return self.num_local * self.nnodes

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """Returns the variables by which a rank knows its place, named as torchrun does."""
        return {
            "RANK": str(self.node_rank * self.num_local + local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.num_local),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nnodes),
        }


def ranks_command(python: str, arguments: Sequence[str], *, told_to: str | Path, place: Place) -> tuple[str, ...]:
    """Writes the command to start this machine's ranks.

    Args:
        python: The interpreter.
        arguments: ``-m`` and a module, or a Python file, and what follows; none where the caller adds them.
        told_to: Where a run ended by a signal is told of it, as ``LaunchPlan.output_dir``.
        place: Which ranks of how many.
    """
    # Several ranks write to one terminal: by whole lines at once, not by buffers.
    unbuffered = ("-u",) if place.world_size > 1 else ()
    endpoint = place.endpoint if place.nnodes > 1 and place.endpoint else _NO_ENDPOINT
    endpoint = _IN_MEMORY if place.is_foreign else endpoint
    numbers = (str(place.num_local), str(place.nnodes), str(place.node_rank))
    return (python, "-P", *unbuffered, "-m", MODULE, str(told_to), *numbers, endpoint, *arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rendezvous:
    """How ranks meet. ``environ``: of all; ``descriptor``: of rank 0 alone; ``folder``: to be removed at the end."""

    environ: dict[str, str] = field(default_factory=dict)
    descriptor: int | None = None
    folder: Path | None = None


def _open_rendezvous(place: Place) -> _Rendezvous:
    if place.world_size == 1 and not place.is_foreign:
        return _Rendezvous()
    if place.endpoint is not None:
        host, _, port = place.endpoint.rpartition(":")
        listener = _listen(host.strip("[]"), int(port)) if place.node_rank == 0 else None
        return _Rendezvous(environ={"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}, descriptor=listener)
    if sys.platform == "linux":
        # Inherited by the ranks, and opened anew by each through its own /proc: it has no name in any folder.
        store = os.memfd_create("mock_scheduler_store")
        return _Rendezvous(environ={STORE_VARIABLE: f"/proc/self/fd/{store}"})
    folder = Path(tempfile.mkdtemp(prefix="mock_scheduler_"))  # for this user alone
    return _Rendezvous(environ={STORE_VARIABLE: str(folder / "store")}, folder=folder)


def _listen(host: str, port: int) -> int:
    """Listens at the address of the endpoint and at no other; returns the descriptor. Raises ``ConfigError``."""
    where = f"--rdzv-endpoint {host}:{port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if ip_address(address[0]).is_loopback and address[0] != host and host != "localhost":
            raise ConfigError(
                f"{where}: on this machine {host} is {address[0]}, which no other machine can reach; give an address"
            )
        return socket.create_server((address[0], port), family=family, backlog=1024).detach()
    except OSError as error:
        raise ConfigError(
            f"{where}: node 0 cannot listen there: {error.strerror or error}; give an address of node 0 and a free port"
        ) from error


def _fork_ranks(place: Place, rendezvous: _Rendezvous) -> dict[int, int] | None:
    """Forks the ranks; returns their global ranks by process id, and in each of them ``None``."""
    supervisor, mask = os.getpid(), block_signals()
    running: dict[int, int] = {}
    for local_rank in range(place.num_local):
        process_id = os.fork()
        if process_id == 0:
            environ = {**place.rank_environment(local_rank), **rendezvous.environ, PARENT_VARIABLE: str(supervisor)}
            os.environ.update(environ | _listener_environment(rendezvous, environ["RANK"]))
            if place.is_foreign:
                meet_in_memory(os.environ)
            end_with_parent(os.environ)
            _seed_by_chance()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return None
        running[process_id] = place.node_rank * place.num_local + local_rank
    if rendezvous.descriptor is not None:
        os.close(rendezvous.descriptor)
    return running


def _seed_by_chance() -> None:
    """Draws new states of the generators that Python and NumPy draw when they are imported.

    Forks have one state, so that draws that nothing seeds would look repeatable.
    """
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _listener_environment(rendezvous: _Rendezvous, global_rank: str) -> dict[str, str]:
    """Keeps the listening descriptor for rank 0 alone."""
    if "MASTER_ADDR" not in rendezvous.environ:
        return {}
    if global_rank == "0":
        return {LISTENER_VARIABLE: str(rendezvous.descriptor)}
    if rendezvous.descriptor is not None:
        os.close(rendezvous.descriptor)
    return {LISTENER_VARIABLE: ""}


def main(arguments: Sequence[str]) -> int:
    """Starts the ranks and waits for them; returns the meant exit code. A rank ends as its module does."""
    end_with_parent(os.environ)
    told_to, num_local, nnodes, node_rank, endpoint, *target = arguments
    is_module = target[:1] == ["-m"]
    name, *others = target[1:] if is_module else target
    place = Place(
        num_local=int(num_local),
        nnodes=int(nnodes),
        node_rank=int(node_rank),
        endpoint=None if endpoint in (_NO_ENDPOINT, _IN_MEMORY) else endpoint,
        is_foreign=endpoint == _IN_MEMORY,
    )
    try:
        (check_entry if is_module else check_script)(name)
        rendezvous = _open_rendezvous(place)
    except ConfigError as error:
        print_message(f"error: {error}")
        return int(error.exit_code)
    adopt_orphans()
    running = _fork_ranks(place, rendezvous)
    if running is None:
        (run_entry if is_module else run_script)(name, others)
        sys.exit()
    return _supervise(running, rendezvous, Path(told_to))


def _supervise(running: dict[int, int], rendezvous: _Rendezvous, told_to: Path) -> int:
    supervision = Supervision(running)
    supervision.wait()
    if rendezvous.folder is not None:
        shutil.rmtree(rendezvous.folder, ignore_errors=True)
    if supervision.ended_by is not None:
        return meant_exit_code(-int(supervision.ended_by))
    if not supervision.failures:
        return 0
    return report_failed_ranks(supervision.failures, told_to, started_s=supervision.started_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
