"""Lets runs follow each other in one process group: cleans the process up between them, and says whether one may
follow.

Contract: everything here is about this process, except ``has_ended_alike`` and ``is_group_whole``: every rank calls
them.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import distributed_c10d

from mock_scheduler.megatron.host_device import compute_device

# How long a rank waits for the others at the end of a run: one that failed alone holds its peers in a collective, and
# its end is what ends them; one that is done waits for the files that rank 0 still writes.
FAILED_TIMEOUT = timedelta(seconds=20)
DONE_TIMEOUT = timedelta(minutes=2)


@contextmanager
def process_as_found() -> Iterator[None]:
    """Gives the process back as the block found it: environment, random states, flags of torch, warnings, caches.

    Megatron writes to the environment (``NVTE_*``) and keeps losses of routers by name, and torch's compiler
    generalises its code at the second shape it sees.
    """
    environ = dict(os.environ)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    flags = _read_flags()
    with warnings.catch_warnings():
        yield
    os.environ.clear()
    os.environ.update(environ)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu)
    _restore_flags(flags)
    get_moe_layer_wise_logging_tracker().clear()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()


deterministic: Any = torch.utils.deterministic

_Flags = tuple[bool, bool, bool, bool, bool, int, torch.dtype, str]


def _read_flags() -> _Flags:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    )


def _restore_flags(flags: _Flags) -> None:
    is_deterministic, warns_only, fills_memory, cudnn_deterministic, cudnn_benchmark, threads, dtype, precision = flags
    torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
    deterministic.fill_uninitialized_memory = fills_memory
    torch.backends.cudnn.deterministic = cudnn_deterministic
    torch.backends.cudnn.benchmark = cudnn_benchmark
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    if torch.get_float32_matmul_precision() != precision:
        torch.set_float32_matmul_precision(precision)  # sets more than it reads: also where nobody had set anything


def has_ended_alike(number: int, exit_code: int) -> bool:
    """Whether every rank has ended the session's run of this number, with this exit code. Every rank calls it.

    Through the group's store, since a rank that failed may have left the others in the middle of a collective; they
    must also have issued equally many in the group of all.
    """
    store = distributed_c10d._get_default_store()
    world: Any = dist.group.WORLD
    issued = world._get_sequence_number_for_group()
    keys = [f"mock_scheduler/run/{number}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], f"{exit_code} {issued}")
    try:
        store.wait(keys, FAILED_TIMEOUT if exit_code else DONE_TIMEOUT)
    except RuntimeError:  # a store of torch's: at the end of the wait, or of a connection
        return False
    return len({bytes(store.get(key)) for key in keys}) == 1


def is_group_whole() -> bool:
    """Says whether the group of all ranks still reduces; a rank's failure may have broken a connection."""
    ones = torch.ones(1, dtype=torch.int64, device=compute_device())
    options = AllreduceOptions()
    options.timeout = FAILED_TIMEOUT
    world: Any = dist.group.WORLD
    try:
        world.allreduce([ones], options).wait()
    except RuntimeError:
        return False
    return int(ones) == dist.get_world_size()
