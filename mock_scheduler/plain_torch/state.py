"""Reads this rank's parameters, gradients and optimizer state where they lie, without communication.

Contract: tensors are given as they are, not copied. A parameter has the name that the model gives it, without what
wrappers add. A ``DTensor`` (FSDP2, tensor parallelism) is given as this rank's shard with its place in the whole; a
layout whose place cannot be told is refused, since a trace with it would be of another tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.shards import Block, ShardSpec, Split, whole

#: The kinds that are read here; ``initial`` and ``parameter`` are the same tensors, before and after an update.
StateKind: TypeAlias = Literal["initial", "gradient", "parameter", "optimizer"]


def plain_name(name: str) -> str:
    """Give a parameter's name without what wrappers of torch add.

    A model that calls a part of its own ``module`` keeps the name: only what leads, and torch's own words, go.
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return re.sub(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", "", name)


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """List the parameters by name, a tied one once.

    Raises ``TraceError`` where two have one name, or where FSDP1 has flattened them.
    """
    found: dict[str, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if name.endswith("_flat_param"):
            raise TraceError(
                f"parameter {name}: FSDP1 keeps the parameters of a module in one flat tensor, whose parts have no "
                "names; use FSDP2 (fully_shard; accelerate: fsdp_version: 2)"
            )
        plain = plain_name(name)
        if plain in found:
            raise TraceError(f"two parameters have the name {plain!r} without their wrappers; one is {name!r}")
        found[plain] = parameter
    return found


def read_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, kind: StateKind
) -> Iterator[tuple[ShardSpec, torch.Tensor]]:
    """Yield this rank's pieces of one kind.

    ``gradient``: of each parameter that has one. ``optimizer``: each state of a parameter's shape, as
    ``{parameter}.exp_avg``; nothing before the first update.
    """
    for name, parameter in named_parameters(model).items():
        if kind in ("initial", "parameter"):
            yield from _piece(name, parameter)
        elif kind == "gradient" and parameter.grad is not None:
            yield from _piece(name, parameter.grad)
        elif kind == "optimizer" and optimizer is not None:
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    yield from _piece(f"{name}.{key}", value)


def _piece(name: str, tensor: torch.Tensor) -> Iterator[tuple[ShardSpec, torch.Tensor]]:
    if not isinstance(tensor, DTensor):
        yield whole(name, tuple(tensor.shape)), tensor.detach()
        return
    strange = [placement for placement in tensor.placements if type(placement) not in (Shard, Replicate)]
    sharded = [placement.dim for placement in tensor.placements if isinstance(placement, Shard)]
    if strange or len(set(sharded)) < len(sharded):
        raise TraceError(
            f"{name} is a DTensor with placements {tuple(tensor.placements)}: the place of this rank's elements in the "
            "whole tensor is known for Replicate, and for Shard of different dimensions, alone"
        )
    local: Any = tensor.to_local()
    shape = tuple(tensor.shape)
    if not local.numel():  # more ranks than rows
        return
    splits = []
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard) and local.shape[placement.dim] < shape[placement.dim]:
            # torch.chunk: all parts but the last ones have one size.
            part = -(-shape[placement.dim] // tensor.device_mesh.size(axis))
            start = part * coordinate[axis]
            length = min(part, shape[placement.dim] - start)
            if length != local.shape[placement.dim]:
                raise TraceError(
                    f"{name}: this rank has {local.shape[placement.dim]} of {shape[placement.dim]} indices of "
                    f"dimension {placement.dim}; expected {length}, as torch.chunk gives"
                )
            blocks = (Block(local_start=0, global_start=start, length=length),)
            splits.append(Split(dim=placement.dim, blocks=blocks))
    splits.sort(key=lambda split: split.dim)
    spec = ShardSpec(name=name, global_shape=shape, local_shape=tuple(local.shape), splits=tuple(splits))
    yield spec, local.detach()
