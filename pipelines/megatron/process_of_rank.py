"""Process groups, ranks and seeds of one run are made once, before any model is built."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, field, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
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
        """Returns the divisor of an update's number of micro-batches: dp, and pp for the interleaved schedule."""
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
    for good: the wrapper's gradient hooks hold it in a cycle through autograd's nodes, invisible to Python, as do the
    weights of experts that a dispatcher keeps of its last pass. So would a position embedding, whose results Megatron
    keeps by the module that computed them (``lru_cache``).
    """
    for holder in [item for item in gc.get_objects() if isinstance(item, DistributedDataParallel | MoETokenDispatcher)]:
        holder.__dict__.clear()
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
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
