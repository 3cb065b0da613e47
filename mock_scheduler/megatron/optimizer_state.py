"""Reads and sets Adam's state by parameter, whole for this rank's shard, whichever optimizer keeps it and in which
parts.

Megatron's own ``sharded_state_dict`` of optimizers would not do (megatron-core 0.16.1): it narrows float64 to float32,
fails where a rank's torch Adam has no state (before its first update, or where it owns nothing), and numbers chained
optimizers by rank, so a stage without experts does not find its state in the checkpoint of a stage with them. Here
every optimizer gives and takes the same: the moments of each parameter in the parameter's own shape, for bfloat16
parameters the updated wide copy, and one number of updates. Parameter groups follow from the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.partition import main_param

MOMENTS = ("exp_avg", "exp_avg_sq")
WIDE_COPY = "fp32_param"

ParameterState = dict[str, torch.Tensor]
"""``exp_avg``, ``exp_avg_sq`` and, of a bfloat16 parameter, ``fp32_param``: of the local shard's shape."""


def state_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's state in Adam."""
    return torch.promote_types(parameter.dtype, torch.float32)


def state_names(parameter: torch.Tensor) -> tuple[str, ...]:
    """Lists the tensors of a parameter's state."""
    return MOMENTS if state_dtype(parameter) is parameter.dtype else (*MOMENTS, WIDE_COPY)


def read_states(model: ObservedModel) -> dict[torch.nn.Parameter, ParameterState]:
    """The state of every parameter of this rank; moments are 0 before the first update. Collective, over dp."""
    states: dict[torch.nn.Parameter, ParameterState] = {}
    for optimizer in model.optimizers:
        if optimizer.is_stub_optimizer:
            continue
        if isinstance(optimizer, DistributedOptimizer):
            states.update(_read_distributed(optimizer))
        else:
            for parameter in _parameters(optimizer, model):
                inner = _wide_copy(parameter)
                states[parameter] = {
                    name: _state_of(optimizer, inner, name).view_as(parameter) for name in state_names(parameter)
                }
    return states


def write_states(
    model: ObservedModel, states: Mapping[torch.nn.Parameter, ParameterState], *, num_updates: int
) -> None:
    """Sets every optimizer's state from states read under this layout or another."""
    for optimizer in model.optimizers:
        if optimizer.is_stub_optimizer:
            continue
        if isinstance(optimizer, DistributedOptimizer):
            for parameter, owned, inner in _owned_parts(optimizer):
                parts = {name: state.flatten()[owned] for name, state in states[parameter].items()}
                _set_state(optimizer, inner, parts, num_updates=num_updates)
        else:
            for parameter in _parameters(optimizer, model):
                _set_state(optimizer, _wide_copy(parameter), states[parameter], num_updates=num_updates)
        _set_group_steps(optimizer, num_updates)


def share_parameters(model: ObservedModel) -> None:
    """Gives every rank the parameters as their owners have them; nothing without a distributed optimizer.

    Collective, over dp.
    """
    for chunk in model.chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


def count_updates(model: ObservedModel, *, device: torch.device) -> int:
    """How many updates Adam has counted; the same on all ranks, also those that own no part. Collective."""
    total = torch.tensor([count_own_updates(model)], dtype=torch.int64, device=device)
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return int(total)


def count_own_updates(model: ObservedModel) -> int:
    """How many updates Adam has counted on this rank; 0 where it owns no part."""
    return max((_count_own_updates(optimizer) for optimizer in model.optimizers), default=0)


def _count_own_updates(optimizer: MegatronOptimizer) -> int:
    """Returns torch's Adam counts by parameter, those of TransformerEngine and apex by group."""
    if optimizer.is_stub_optimizer:
        return 0
    counts = [state["step"] for state in optimizer.optimizer.state.values() if "step" in state]
    counts += [group["step"] for group in optimizer.optimizer.param_groups if "step" in group]
    return max((int(count) for count in counts), default=0)


def _parameters(optimizer: MegatronOptimizer, model: ObservedModel) -> list[torch.nn.Parameter]:
    """Returns the model's parameters that an optimizer without distributed state updates."""
    inner = {id(parameter) for group in optimizer.optimizer.param_groups for parameter in group["params"]}
    parameters = (parameter for chunk in model.chunks for parameter in chunk.parameters())
    return [parameter for parameter in parameters if id(_wide_copy(parameter)) in inner]


def _wide_copy(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Returns the tensor updated in a parameter's place (``Float16OptimizerWithFloat16Params``), or itself."""
    is_wide = state_dtype(parameter) is parameter.dtype
    return parameter if is_wide else main_param(parameter)


def _state_of(optimizer: MegatronOptimizer, inner: torch.Tensor, name: str) -> torch.Tensor:
    if name == WIDE_COPY:
        return inner.detach()
    state = optimizer.optimizer.state.get(inner) or {}
    return state[name] if name in state else torch.zeros_like(inner, dtype=state_dtype(inner))


def _set_state(
    optimizer: MegatronOptimizer, inner: torch.Tensor, parts: Mapping[str, torch.Tensor], *, num_updates: int
) -> None:
    if WIDE_COPY in parts:
        inner.data.copy_(parts[WIDE_COPY].view_as(inner))
    state: dict[str, Any] = {name: parts[name].detach().view_as(inner).clone() for name in MOMENTS}
    if counts_by_parameter(optimizer):
        # torch keeps a float32 tensor on the host, also for parameters on a GPU.
        state["step"] = torch.tensor(float(num_updates))
    optimizer.optimizer.state[inner] = state


def empty_state(inner: torch.Tensor) -> dict[str, torch.Tensor]:
    """Makes the moments of a tensor before its first update."""
    return {name: torch.zeros_like(inner.detach(), dtype=state_dtype(inner)) for name in MOMENTS}


def counts_by_parameter(optimizer: MegatronOptimizer) -> bool:
    """Whether an optimizer counts its updates at each parameter's state, as torch's does, and not at its groups."""
    return isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _set_group_steps(optimizer: MegatronOptimizer, num_updates: int) -> None:
    """Let TransformerEngine's and apex's Adam go on counting; a group of theirs has no step before its first update."""
    if not counts_by_parameter(optimizer):
        for group in optimizer.optimizer.param_groups:
            group["step"] = num_updates


def _owned_parts(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, slice, torch.Tensor]]:
    """Yields each parameter with a part on this rank, the part as a flat range, and the tensor that Adam updates."""
    for _, _, ranges in _buckets(optimizer):
        for parameter, places in ranges.items():
            group, position = optimizer.model_param_group_index_map[parameter]
            owned = slice(places["param"].start, places["param"].end)
            yield parameter, owned, optimizer.optimizer.param_groups[group]["params"][position]


def _buckets(optimizer: DistributedOptimizer) -> Iterator[tuple[Any, Any, dict[torch.nn.Parameter, Any]]]:
    """Yields buffer, bucket and the ranges of this rank's parts of the parameters in it."""
    for buffer, by_dtype in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        (by_bucket,) = by_dtype.values()  # a buffer holds parameters of one dtype
        for bucket, ranges in zip(buffer.buckets, by_bucket, strict=True):
            yield buffer, bucket, ranges["param_map"]


def _read_distributed(optimizer: DistributedOptimizer) -> dict[torch.nn.Parameter, ParameterState]:
    """Returns whole states of all parameters, put together from the ranks that own parts of their bucket."""
    inner_of = {parameter: inner for parameter, _, inner in _owned_parts(optimizer)}
    states: dict[torch.nn.Parameter, ParameterState] = {}
    for buffer, bucket, ranges in _buckets(optimizer):
        own_size = bucket.grad_data.numel() // optimizer.data_parallel_group.size()
        for name in state_names(bucket.params_list[0]):
            dtype = state_dtype(bucket.params_list[0])
            own = torch.zeros(own_size, dtype=dtype, device=bucket.grad_data.device)
            for parameter, places in ranges.items():
                value = _state_of(optimizer, inner_of[parameter], name).flatten()
                own[places["gbuf_local"].start : places["gbuf_local"].end] = value
            parts = [torch.empty_like(own) for _ in range(optimizer.data_parallel_group.size())]
            dist.all_gather(parts, own, group=optimizer.data_parallel_group)
            gathered = torch.cat(parts)
            for parameter in bucket.params_list:
                start, end, _ = buffer.param_index_map[parameter]
                whole = gathered[start - bucket.offset : end - bucket.offset].view(parameter.shape)
                states.setdefault(parameter, {})[name] = whole
    return states
