"""Ranks meet without a server, and on their machine alone."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from mock_scheduler.launch.process_group import join_process_group, stay_on_this_machine
from tests.launch.process_tree import find_listeners
from tests.programs import run_ranks

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"

# Both ranks write to the store, and each reads the other's; rank 0 says what it is.
MEETING = """\
import os, stat
from datetime import timedelta
from torch.distributed import FileStore
path = os.environ["MOCK_SCHEDULER_STORE"]
store, rank = FileStore(path, 2), os.environ["RANK"]
store.set(rank, f"of {rank}")
other = store.get(str(1 - int(rank)))
store.set(f"read {rank}", "yes")
store.wait([f"read {1 - int(rank)}"], timedelta(seconds=20))
if rank == "0":
    print(other.decode(), os.readlink(path).split()[0], os.stat(path).st_nlink, "MASTER_ADDR" in os.environ)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has files without a name for all of a process's children"
)
def test_ranks_of_one_machine_meet_in_a_file_without_a_name(tmp_path: Path) -> None:
    """No other user can open it, nothing is left of it, and nobody listens."""
    (tmp_path / "meeting.py").write_text(MEETING, encoding="utf-8")
    done = run_ranks(2, "meeting", [], told_to=tmp_path / "out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "of 1 /memfd:mock_scheduler_store 0 False\n"), done.stderr


def test_an_interface_of_the_users_is_kept() -> None:
    environ = {"GLOO_SOCKET_IFNAME": "eth7"}
    stay_on_this_machine(environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": LOOPBACK}


def test_a_process_without_a_launcher_is_a_group_that_nobody_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo listens for a single rank, too."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    before = find_listeners({os.getpid()})
    join_process_group("gloo", timeout=timedelta(seconds=20))
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        listening = find_listeners({os.getpid()}) - before
        assert all(address.is_loopback for address, _ in listening)
        assert os.environ["GLOO_SOCKET_IFNAME"] == LOOPBACK
    finally:
        dist.destroy_process_group()
    assert socket.if_nametoindex(LOOPBACK) > 0


# Rank 1 sends what no rank of ours would: an object that says what to call where it is read.
SENDING = """\
import os, pathlib, pickle, sys
import torch, torch.distributed as dist
from pipelines.megatron.process_of_rank import join_group
join_group()
class Gadget:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("ran"),)
plain = [(None, False), {"lr": 1.5, "x": b"1"}]
for sent in (plain, Gadget(), pathlib.Path):
    objects = [None, None]
    try:
        dist.all_gather_object(objects, sent if os.environ["RANK"] == "1" else plain)
        said = "read" if objects == [plain, plain] else "other"
    except pickle.UnpicklingError as error:
        said = str(error).partition(":")[0]
    if os.environ["RANK"] == "0":
        print(said, flush=True)
os._exit(0)
"""


def test_an_object_of_another_rank_runs_nothing(tmp_path: Path) -> None:
    """On the loopback interface any user of the machine may reach a port of gloo's before its peer does."""
    (tmp_path / "sending.py").write_text(SENDING, encoding="utf-8")
    done = run_ranks(2, "sending", [], told_to=tmp_path / "out", cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [
            "read",
            "another rank sent an object that names 'pathlib'.'Path.touch'",
            "another rank sent an object that names 'pathlib'.'Path'",
        ],
    ), done.stderr
    assert not (tmp_path / "ran").exists()
