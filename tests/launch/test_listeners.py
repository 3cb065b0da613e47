"""Sockets on which a run listens are looked up while it runs; ``tests/dist/test_listeners.py`` has one machine's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mock_scheduler.launch.launcher import RunningProcesses, run_plan
from mock_scheduler.launch.ranks import Place, ranks_command
from tests.launch.process_tree import find_below, find_listeners, find_open

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the sockets of a process in /proc")

# Joins as the pipeline does, makes a second group as Megatron does, then waits until the test has looked.
ENTRY = """\
import os, pathlib, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from mock_scheduler.launch.process_group import join_process_group
join_process_group("gloo", timeout=timedelta(seconds=20))
group = dist.new_group([0, 1])
ones = torch.ones(2)
dist.all_reduce(ones, group=group)
folder = pathlib.Path(sys.argv[1])
(folder / f"joined-{dist.get_rank()}").write_text(str(ones.tolist()))
while not (folder / "looked").exists():
    time.sleep(0.02)
dist.destroy_process_group()
"""


# A program of somebody else's: it knows torch alone, leaves its group and makes another one, by either way of torch's.
FOREIGN = """\
import os, pathlib, sys, time
import torch, torch.distributed as dist
import beside
folder = pathlib.Path(sys.argv[1])
place = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
numbers = {"rank": int(os.environ["RANK"]), "world_size": 2}
for keys in ({}, numbers, {"init_method": place, **numbers}):
    dist.init_process_group("gloo", **keys)
    group, ones = dist.new_group([0, 1]), torch.ones(2)
    dist.all_reduce(ones, group=group)
    objects = [None, None]
    dist.all_gather_object(objects, beside.Own(dist.get_rank()))
    assert [item.value for item in objects] == [0, 1]
    if keys is not numbers and "init_method" in keys:
        (folder / f"joined-{dist.get_rank()}").write_text(str(ones.tolist()))
        while not (folder / "looked").exists():
            time.sleep(0.02)
    dist.destroy_process_group()
"""
BESIDE = "class Own:\n    def __init__(self, value):\n        self.value = value\n"


@contextmanager
def child(code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has said a line, and is ended."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("family", "host", "is_open"),
    [
        ("AF_INET", "0.0.0.0", True),
        ("AF_INET6", "::", True),
        ("AF_INET6", "::ffff:0.0.0.0", True),
        ("AF_INET", "127.0.0.1", False),
        ("AF_INET", "127.0.0.9", False),
        ("AF_INET6", "::1", False),
        ("AF_INET6", "::ffff:127.0.0.1", False),
    ],
)
def test_a_listener_that_another_address_reaches_is_found(family: str, host: str, is_open: bool) -> None:
    """The planted fault: what the tests below look with must see it, in a child of the named process too."""
    code = (
        f"import socket, time; s = socket.socket(socket.{family}); s.bind(({host!r}, 0)); s.listen(); "
        "print(s.getsockname()[1], flush=True); time.sleep(600)"
    )
    with child(code) as process:
        found = find_listeners(find_below(os.getpid()) & find_below(process.pid))
        assert len(found) == 1
        assert bool(find_open({process.pid})) is is_open


def start(folder: Path, commands: list[tuple[str, ...]]) -> list[subprocess.Popen[bytes]]:
    (folder / "meeting_entry.py").write_text(ENTRY, encoding="utf-8")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return [subprocess.Popen(command, cwd=folder, env=environ, start_new_session=True) for command in commands]


def look(folder: Path, processes: list[subprocess.Popen[bytes]], seen: Callable[[set[int]], None]) -> None:
    """Calls ``seen`` with all processes of the run again and again until every rank has joined, and once after."""
    try:
        has_joined = False
        while not has_joined:
            assert all(process.poll() is None for process in processes)
            has_joined = all((folder / f"joined-{rank}").is_file() for rank in (0, 1))
            seen({below for process in processes for below in find_below(process.pid)})
            time.sleep(0.05)
        (folder / "looked").touch()
        assert [process.wait(timeout=30) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()


@pytest.mark.parametrize("target", [("train.py",), pytest.param(("-m", "train"), marks=pytest.mark.all)])
def test_ranks_of_a_foreign_program_listen_on_loopback_alone(tmp_path: Path, target: tuple[str, ...]) -> None:
    """The README's first command was torchrun, whose store listens on all addresses and unpickles what comes."""
    (tmp_path / "train.py").write_text(FOREIGN, encoding="utf-8")
    (tmp_path / "beside.py").write_text(BESIDE, encoding="utf-8")
    arguments = (*target, str(tmp_path))
    command = ranks_command(sys.executable, arguments, told_to=tmp_path, place=Place(num_local=2, is_foreign=True))
    listeners: set[str] = set()

    def seen(process_ids: set[int]) -> None:
        assert find_open(process_ids) == set()
        listeners.update(str(address) for address, _ in find_listeners(process_ids))

    look(tmp_path, start(tmp_path, [command]), seen)
    assert listeners == {"127.0.0.1"}
    assert (tmp_path / "joined-1").read_text() == "[2.0, 2.0]"


def test_a_foreign_program_alone_meets_nobody(tmp_path: Path) -> None:
    text = "import torch.distributed as d; d.init_process_group('gloo'); print(d.get_world_size(), __name__)"
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    command = ranks_command(sys.executable, ("train.py",), told_to=tmp_path, place=Place(num_local=1, is_foreign=True))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1 __main__\n")


def test_a_file_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    command = ranks_command(sys.executable, ("python", "train.py"), told_to=tmp_path, place=Place(num_local=2))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr.startswith(f"error: there is no Python file python in {tmp_path}")


def test_torch_has_what_a_foreign_program_is_kept_from_listening_by() -> None:
    """A release of torch that meets by another function would listen again; then the import fails."""
    from torch.distributed import rendezvous

    assert callable(rendezvous.__globals__["_create_c10d_store"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.all
def test_over_several_machines_the_store_listens_at_the_named_address_alone(tmp_path: Path) -> None:
    """Two launchers stand for two machines; each has a rank, and rank 0 has the store. In the run of one machine, that
    ``tests/dist/test_listeners.py`` looks at, there is none.
    """
    port = free_port()
    places = [Place(num_local=1, nnodes=2, node_rank=node, endpoint=f"127.0.0.1:{port}") for node in (0, 1)]
    arguments = ("-m", "meeting_entry", str(tmp_path))
    commands = [ranks_command(sys.executable, arguments, told_to=tmp_path, place=place) for place in places]
    processes = start(tmp_path, commands)
    found: set[str] = set()

    def seen(process_ids: set[int]) -> None:
        found.update(str(address) for address, listening in find_listeners(process_ids) if listening == port)

    look(tmp_path, processes, seen)
    assert found == {"127.0.0.1"}
    assert (tmp_path / "joined-1").read_text() == "[2.0, 2.0]"


@pytest.mark.parametrize(
    ("endpoint", "problem"),
    [
        ("192.0.2.7:29500", "node 0 cannot listen there: "),  # TEST-NET-1, no machine's
        ("no-such-host.invalid:29500", "node 0 cannot listen there: "),
    ],
)
def test_an_endpoint_that_is_not_node_0s_is_refused_at_once(tmp_path: Path, endpoint: str, problem: str) -> None:
    place = Place(num_local=1, nnodes=2, node_rank=0, endpoint=endpoint)
    command = ranks_command(sys.executable, ("-m", "json.tool"), told_to=tmp_path, place=place)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr.startswith(f"error: --rdzv-endpoint {endpoint}: {problem}")


@pytest.mark.all
def test_a_real_run_of_several_processes_listens_on_loopback_alone(tmp_path: Path) -> None:
    """The quickstart in four processes, by the command line's own plan."""
    from tests.launch.runs import plan_quickstart

    listeners: set[str] = set()
    running = RunningProcesses()

    def watch() -> None:
        below = find_below(os.getpid()) - {os.getpid()}
        assert find_open(below) == set()
        listeners.update(str(address) for address, _ in find_listeners(below))

    layout = ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2")
    plan = plan_quickstart(tmp_path / "run", *layout)
    assert run_plan(plan, log_path=tmp_path / "log", watch=watch, running=running) == 0
    assert listeners == {"127.0.0.1"}
