"""Joins the ranks that a launcher started to one process group, over addresses that only they need.

On one machine nothing of it is reachable from another: ranks meet in a file that only they can open, and gloo and NCCL
connect over the loopback interface unless the user chose another. On several machines rank 0 listens at the user's
endpoint alone, and gloo and NCCL choose their interfaces themselves.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

from mock_scheduler.launch.ranks import LISTENER_VARIABLE, STORE_VARIABLE

# Read by gloo and NCCL whenever a group is made.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def join_process_group(backend: str, *, timeout: timedelta) -> None:
    """Joins the process group of all ranks. Every rank must call it.

    A process that no launcher started is a group of its own; one that another launcher than ours started meets the
    others as torch does by default (``env://``).

    Args:
        backend: ``gloo`` or ``nccl``.
        timeout: Of every collective, and of waiting for the other ranks.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == world_size:
        stay_on_this_machine(os.environ)
    store = _open_store(world_size, timeout)
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def stay_on_this_machine(environ: MutableMapping[str, str]) -> None:
    """Has gloo and NCCL of this process listen on the loopback interface, where ``environ`` names no other."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in names if name in {"lo", "lo0"}), None)
    if loopback is not None:
        for variable in _INTERFACE_VARIABLES:
            environ.setdefault(variable, loopback)


def _open_store(world_size: int, timeout: timedelta) -> Store | None:
    if world_size == 1:
        return HashStore()
    if STORE_VARIABLE in os.environ:
        return FileStore(os.environ[STORE_VARIABLE], world_size)
    if LISTENER_VARIABLE not in os.environ:
        return None
    listener = os.environ[LISTENER_VARIABLE]
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=listener != "",
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=int(listener) if listener else None,
    )
