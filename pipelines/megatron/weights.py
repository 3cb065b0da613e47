"""Where each parameter of this rank lies in the whole model, and the canonical initial weights.

Initial weights are made by canonical name and full shape, then cut: no layout changes a single bit of them. Values
come from NumPy's Philox generator keyed by the name, so they do not depend on the order of construction, on any
global random state or on the processor's vector width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from mock_scheduler.config.schema import ModelConfig
from mock_scheduler.trace.names import OUTPUT_LAYER, WORD_EMBEDDINGS, canonical_parameter_name
from mock_scheduler.trace.shards import Block, ShardSpec, cut_shard, whole
from pipelines.megatron.model import unwrapped
from pipelines.megatron.runtime import Runtime

# Megatron scales the initialisation of the two layers that write to the residual stream by depth
# (megatron/core/utils.py, scaled_init_method_normal).
_RESIDUAL_WRITERS = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
_GATED = ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalParameter:
    """One parameter of this rank and its place in the whole model."""

    spec: ShardSpec
    parameter: torch.nn.Parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What decides the global shapes besides the parameters themselves."""

    model: ModelConfig
    vocab_size: int


def iterate_parameters(policy: torch.nn.Module, shape: ModelShape, runtime: Runtime) -> Iterator[LocalParameter]:
    """Every parameter of this rank with its canonical name and shard, in the model's own order."""
    gpt = unwrapped(policy)
    layer_offset = runtime.pp_rank * (shape.model.num_layers // runtime.pp_size)
    tied = not shape.model.untie_embeddings_and_output_weights
    for local_name, parameter in gpt.named_parameters():
        name = canonical_parameter_name(local_name, layer_offset=layer_offset, tied_output=tied)
        yield LocalParameter(spec=_parameter_spec(name, parameter, shape, runtime), parameter=parameter)


def _parameter_spec(name: str, parameter: torch.nn.Parameter, shape: ModelShape, runtime: Runtime) -> ShardSpec:
    local_shape = tuple(parameter.shape)
    is_split = getattr(parameter, "tensor_model_parallel", False)  # set by Megatron on the parameters it splits
    if name in (WORD_EMBEDDINGS, OUTPUT_LAYER):
        return _vocab_spec(name, local_shape, shape.vocab_size, runtime.tp_rank)
    if not is_split:
        return whole(name, local_shape)
    dim, tp = parameter.partition_dim, runtime.tp_size
    global_shape = tuple(size * tp if index == dim else size for index, size in enumerate(local_shape))
    num_parts = 2 if shape.model.swiglu and name.endswith(_GATED) else 1
    local_part, global_part = local_shape[dim] // num_parts, global_shape[dim] // num_parts
    blocks = tuple(
        Block(
            local_start=part * local_part,
            global_start=part * global_part + runtime.tp_rank * local_part,
            length=local_part,
        )
        for part in range(num_parts)
    )
    return ShardSpec(name=name, global_shape=global_shape, local_shape=local_shape, dim=dim, blocks=blocks)


def _vocab_spec(name: str, local_shape: tuple[int, ...], vocab_size: int, tp_rank: int) -> ShardSpec:
    rows = local_shape[0]
    start = tp_rank * rows
    length = max(0, min(rows, vocab_size - start))
    return ShardSpec(
        name=name,
        global_shape=(vocab_size, *local_shape[1:]),
        local_shape=local_shape,
        dim=0,
        blocks=(Block(local_start=0, global_start=start, length=length),) if length else (),
    )


def canonical_initial_weight(name: str, shape: tuple[int, ...], *, model: ModelConfig, seed: int) -> torch.Tensor:
    """float32 ``[*shape]``: the initial value of the parameter ``name``, the same in every layout.

    Norm weights are 1 and biases 0; all else is normal with ``init_method_std``, divided by sqrt(2 · num_layers) for
    the layers that write to the residual stream.
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if name.endswith("layernorm.weight"):
        return torch.ones(shape)
    key = hashlib.sha256(f"initial-weight/{seed}/{name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    std = model.init_method_std
    if name.endswith(_RESIDUAL_WRITERS):
        std /= (2.0 * model.num_layers) ** 0.5
    return torch.from_numpy((generator.standard_normal(shape) * std).astype(np.float32))


@torch.no_grad()
def load_initial_weights(policy: torch.nn.Module, shape: ModelShape, runtime: Runtime, *, seed: int) -> None:
    """Set this rank's parameters to its cut of the canonical initial weights; vocabulary padding becomes 0."""
    for local in iterate_parameters(policy, shape, runtime):
        spec = local.spec
        full = canonical_initial_weight(spec.name, spec.global_shape, model=shape.model, seed=seed)
        local.parameter.copy_(cut_shard(full, spec))
