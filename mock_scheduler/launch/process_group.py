"""Joins the ranks that a launcher started to one process group, over addresses that only they need.

On one machine nothing of it is reachable from another: ranks meet in a file that only they can open, and gloo and NCCL
connect over the loopback interface unless the user chose another. On several machines rank 0 listens at the user's
endpoint alone, and gloo and NCCL choose their interfaces themselves.

Whoever reaches a port of gloo's before its peer does is taken for the peer: it asks for no key, and on the loopback
interface any user of the machine may try. So our own training reads an object that comes from another rank as data.
"""

from __future__ import annotations

import os
import pickle
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore
from torch.distributed import distributed_c10d

from mock_scheduler.launch.meeting import STORE_VARIABLE, stay_on_this_machine
from mock_scheduler.launch.ranks import LISTENER_VARIABLE


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


def read_objects_as_data() -> None:
    """Has torch's collectives of objects, which Megatron uses once for each optimizer, take plain data alone.

    For a program that exchanges no objects of its own.
    """
    distributed_c10d._unpickler = DataUnpickler  # torch 2.13 reads every object from another rank by it


class DataUnpickler(pickle.Unpickler):
    """Reads numbers, texts and collections of them; calls nothing, and imports nothing."""

    def find_class(self, module_name: str, global_name: str, /) -> object:
        """Refuses every class and function."""
        raise pickle.UnpicklingError(
            f"another rank sent an object that names {module_name!a}.{global_name!a}: ranks exchange plain data alone, "
            "so this is no rank of this run"
        )


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
