"""Reads this rank's gradients, parameters and optimizer state of a model where they lie, without communication.

Contract: tensors are given as they are, not copied. With the distributed optimizer a rank has a reduced flat range of
each parameter's gradient, and its moments: the spec says the range. A buffer of the model's state (persistent, of
floats, as the bias of experts) is one more parameter, without gradient and moments: rules of its own move it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.optimizer_state import MOMENTS, state_dtype
from mock_scheduler.megatron.parameters import LocalParameter, iterate_parameters, iterate_state_buffers
from mock_scheduler.megatron.partition import main_grad, main_param
from mock_scheduler.trace.entries import DimName
from mock_scheduler.trace.names import OUTPUT_LAYER, WORD_EMBEDDINGS
from mock_scheduler.trace.shards import ShardSpec

_VOCABULARY = (WORD_EMBEDDINGS, OUTPUT_LAYER)
_ROUTER = ".mlp.router"
_NORM = "layernorm"


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePiece:
    """This rank's part of one tensor, as ``TraceEntry`` has it."""

    spec: ShardSpec
    tensor: torch.Tensor
    dims: tuple[DimName, ...]


def read_state(model: ObservedModel, kind: TraceKind) -> Iterator[StatePiece]:
    """Yields the pieces of one kind: ``gradient``, ``initial`` or ``parameter``, ``weight``, ``optimizer``.

    gradient: main gradients. initial, parameter: in the precision of the update, for bfloat16 ones the optimizer's
    copy; and buffers, in the same precision. weight: bfloat16 parameters themselves; nothing in other precisions.
    optimizer: Adam's moments, named ``{parameter}.exp_avg`` and ``{parameter}.exp_avg_sq``; 0 before the first update.
    """
    for local in iterate_parameters(model):
        dims = _dims_of(local.spec, model)
        for spec, tensor in _READERS[kind](local, model.optimizers):
            yield StatePiece(spec=spec, tensor=tensor.detach(), dims=dims)
    if kind in ("initial", "parameter"):
        dtype = torch.promote_types(model.config.params_dtype, torch.float32)
        for item in iterate_state_buffers(model):
            yield StatePiece(spec=item.spec, tensor=item.buffer.detach().to(dtype), dims=_dims_of(item.spec, model))


def owned_range(optimizer: DistributedOptimizer, local: LocalParameter) -> ShardSpec | None:
    """The shard with the range that this rank owns; ``None`` where another rank owns all of it.

    A parameter is in the maps of its own optimizer, and there only on ranks that own a part of its bucket.
    """
    place = optimizer.model_param_gbuf_map.get(local.parameter)
    if place is None:
        return None
    index, dtype, bucket = place
    ranges = optimizer.gbuf_ranges[index][dtype][bucket]["param_map"].get(local.parameter)
    if ranges is None:
        return None
    owned = ranges["param"]
    return replace(local.spec, flat_range=(owned.start, owned.end))


_Piece = tuple[ShardSpec, torch.Tensor]


def _gradients(local: LocalParameter, optimizers: Sequence[MegatronOptimizer]) -> Iterator[_Piece]:
    if not local.parameter.requires_grad:
        return
    distributed = _distributed(optimizers)
    if not distributed:
        yield local.spec, main_grad(local.parameter)
    for optimizer in distributed:
        spec = None if optimizer.is_stub_optimizer else owned_range(optimizer, local)
        if spec is not None:
            yield spec, main_grad(local.parameter)


def _parameters(local: LocalParameter, optimizers: Sequence[MegatronOptimizer]) -> Iterator[_Piece]:
    if _is_wide(local.parameter):
        yield local.spec, local.parameter
        return
    if not local.parameter.requires_grad:
        yield local.spec, local.parameter.to(state_dtype(local.parameter))  # no optimizer has a copy of it
    for _, spec, updated in updated_tensors(local, optimizers):
        yield spec, updated


def _weights(local: LocalParameter, optimizers: Sequence[MegatronOptimizer]) -> Iterator[_Piece]:
    if not _is_wide(local.parameter):
        yield local.spec, local.parameter


def _moments(local: LocalParameter, optimizers: Sequence[MegatronOptimizer]) -> Iterator[_Piece]:
    for optimizer, spec, updated in updated_tensors(local, optimizers):
        state = optimizer.optimizer.state.get(updated) or {}
        for name in MOMENTS:
            moment = state[name] if name in state else torch.zeros_like(updated, dtype=state_dtype(updated))
            yield replace(spec, name=f"{spec.name}.{name}"), moment


def updated_tensors(
    local: LocalParameter, optimizers: Sequence[MegatronOptimizer]
) -> Iterator[tuple[MegatronOptimizer, ShardSpec, torch.Tensor]]:
    """Yields each optimizer with the tensor it updates in a parameter's place, flat where it is a range.

    Nothing of a frozen parameter, nor where other ranks own all of it.
    """
    if not local.parameter.requires_grad:
        return
    wide = local.parameter if _is_wide(local.parameter) else None
    for optimizer in optimizers:
        if optimizer.is_stub_optimizer:
            continue
        if isinstance(optimizer, DistributedOptimizer):
            spec = owned_range(optimizer, local)
            if spec is not None:
                group, position = optimizer.model_param_group_index_map[local.parameter]
                yield optimizer, spec, optimizer.optimizer.param_groups[group]["params"][position]
            continue
        inner = main_param(local.parameter) if wide is None else wide
        if any(inner is one for group in optimizer.optimizer.param_groups for one in group["params"]):
            yield optimizer, local.spec, inner


_READERS = {
    "gradient": _gradients,
    "initial": _parameters,
    "parameter": _parameters,
    "weight": _weights,
    "optimizer": _moments,
}


def _distributed(optimizers: Sequence[MegatronOptimizer]) -> list[DistributedOptimizer]:
    return [item for item in optimizers if isinstance(item, DistributedOptimizer)]


def _is_wide(parameter: torch.Tensor) -> bool:
    """Whether a parameter is updated in its own precision, float32 or float64."""
    return state_dtype(parameter) is parameter.dtype


def _dims_of(spec: ShardSpec, model: ObservedModel) -> tuple[DimName, ...]:
    """Names the dimensions of a parameter or buffer by its canonical name."""
    name = spec.name.removeprefix(model.prefix)
    is_router = name.rpartition(".")[0].endswith(_ROUTER)
    match len(spec.global_shape):
        case 1 if is_router:
            return ("expert",)
        case 1:
            return ("channel",) if _NORM in name else ("row",)
        case 2 if name in _VOCABULARY and spec.global_shape[0] == model.vocab_size:
            return ("vocab", "channel")
        case 2:
            return ("expert", "channel") if is_router else ("row", "column")
        case 3:
            return ("expert", "row", "column")  # adapters of grouped experts
        case _:
            return ()
