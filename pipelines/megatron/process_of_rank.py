"""Process groups, ranks and seeds of one run, started once, before any model is built; and the way from run to run.

Between runs that follow each other in one process group the process is cleaned up, if another one may follow.

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
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import distributed_c10d

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.errors import LayoutError
from mock_scheduler.launch.process_group import join_process_group, read_objects_as_data
from mock_scheduler.megatron.host_device import compute_device, has_cuda, use_host_device
from mock_scheduler.megatron.ranks import ModelRanks, read_ranks

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime(ModelRanks):
    """Where this process stands in the layout, and the device it computes on.

    ``replica_group``: the ranks that compute one replica of the model (tp × cp × pp), this one included; the first is
    their leader.
    """

    replica_group: dist.ProcessGroup | None = field(default=None, repr=False)

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks for its replica of the model (tp × cp × pp)."""
        return self.tp_rank == 0 and self.pp_rank == 0 and self.cp_rank == 0

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the run's files."""
        return self.global_rank == 0

    @property
    def micro_batch_multiple(self) -> int:
        """The divisor of an update's number of micro-batches: dp, and pp for the interleaved schedule."""
        return self.dp_size * (self.pp_size if self.num_chunks > 1 else 1)


def check_world_size(parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a number of processes that the layout does not use up exactly.

    Raises:
        LayoutError: with every degree and both numbers.
    """
    if parallel.world_size != world_size:
        degrees = [parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size]
        if parallel.context_parallel_size > 1:
            degrees.append(parallel.context_parallel_size)
        product = " × ".join(str(degree) for degree in [*degrees, parallel.data_parallel_size])
        raise LayoutError(
            f"layout {parallel.describe()} needs {product} = {parallel.world_size} "
            f"processes, but {world_size} were started. Start the run with launch/train.sh, which takes the number "
            f"from the configuration, or set parallel.data_parallel_size."
        )


def check_device(parallel: ParallelConfig) -> None:
    """Refuses layouts for GPUs alone on the CPU.

    Raises:
        LayoutError: expert tensor parallelism on the CPU, where gloo has no all-gather of uneven parts.
    """
    if not has_cuda() and parallel.expert_tensor_parallel_size > 1:
        raise LayoutError(
            f"layout {parallel.describe()}: expert_tensor_parallel_size {parallel.expert_tensor_parallel_size} needs "
            "CUDA: on the CPU gloo has no all-gather of uneven parts. Set parallel.expert_tensor_parallel_size=1"
        )


def _own_gpu() -> int:
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise LayoutError(
            f"local rank {local_rank} has no GPU of its own: {num_gpus} are visible on this machine. Use a layout of "
            f"at most {num_gpus} processes per machine, or set CUDA_VISIBLE_DEVICES='' to run on the CPU with gloo."
        )
    return local_rank


def start_runtime(parallel: ParallelConfig, *, seed: int) -> Runtime:
    """Join the process group, build Megatron's groups and seed its random states. Every rank must call it.

    Raises:
        LayoutError: the number of processes does not fit the layout; raised before anything communicates.
    """
    check_world_size(parallel, int(os.environ.get("WORLD_SIZE", "1")))
    check_device(parallel)
    join_group()
    return build_layout(parallel, seed=seed)


def join_group() -> None:
    """Join the process group of all processes that were started, where this one has not, on the device of its own.

    Every rank must call it. Raises ``LayoutError`` where this process has no GPU of its own.
    """
    if has_cuda():
        torch.cuda.set_device(_own_gpu())
    use_host_device()
    if not dist.is_initialized():
        read_objects_as_data()
        join_process_group("nccl" if has_cuda() else "gloo", timeout=COLLECTIVE_TIMEOUT)


def build_layout(parallel: ParallelConfig, *, seed: int) -> Runtime:
    """Megatron's groups for a layout within the process group that is there. Every rank must call it."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    ranks = read_ranks(device=compute_device(), num_chunks=parallel.num_chunks)
    places = {place.name: getattr(ranks, place.name) for place in fields(ranks)}
    return Runtime(**places, replica_group=_replica_group(parallel))


def _replica_group(parallel: ParallelConfig) -> dist.ProcessGroup | None:
    """The ranks with this one's place on dp, ascending; Megatron numbers ranks by tp, cp, dp, pp, the first fastest."""
    own: dist.ProcessGroup | None = None
    inner = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    dp_size = parallel.data_parallel_size
    for dp_rank in range(dp_size):
        ranks = [rank for rank in range(dist.get_world_size()) if rank // inner % dp_size == dp_rank]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    return own


def leave_layout() -> None:
    """Destroys Megatron's groups and ``build_layout``'s, so another layout can follow. Every rank calls it.

    Models of the layout end with it. Megatron only forgets its groups; each of gloo's has threads, one of them wakes a
    hundred times a second, until nothing knows the group any more. A model in ``DistributedDataParallel`` would know it
    for good: the wrapper's gradient hooks hold it in a cycle through autograd's nodes, invisible to Python.
    """
    for wrapper in [item for item in gc.get_objects() if type(item) is DistributedDataParallel]:
        wrapper.__dict__.clear()
    parallel_state.destroy_model_parallel()
    world = dist.group.WORLD
    for group in [group for group in distributed_c10d._world.pg_map if group is not world]:
        dist.destroy_process_group(group)
    gc.collect()


def stop_runtime() -> None:
    """Leave the process group; safe to call when it was never joined."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


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
