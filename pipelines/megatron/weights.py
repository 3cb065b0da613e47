"""Where each parameter and buffer of this rank lies in the whole model, and the canonical initial weights.

Initial weights are made by canonical name and full shape, then cut: no layout changes a single bit of them. Values
come from NumPy's Philox generator keyed by the name, so they do not depend on the order of construction, on any
global random state or on the processor's vector width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mock_scheduler.trace.names import OUTPUT_LAYER, WORD_EMBEDDINGS, canonical_parameter_name
from mock_scheduler.trace.shards import Block, ShardSpec, Split, cut_shard, even_split, whole
from pipelines.config.model import ModelConfig
from pipelines.megatron.model import layers_of_chunk, unwrapped
from pipelines.megatron.parameter_marks import partition_dim
from pipelines.megatron.perturbation import Perturbation
from pipelines.megatron.process.runtime import Runtime

# Megatron scales the initialisation of the two layers that write to the residual stream by depth
# (megatron/core/utils.py, scaled_init_method_normal).
_RESIDUAL_WRITERS = ("self_attention.linear_proj.weight", "linear_fc2.weight")
_GATED = ("linear_fc1.weight", "linear_fc1.bias")
_EXPERTS = ".mlp.experts."
VALUE_HEAD = ("output_layer.weight", "output_layer.bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalParameter:
    """One parameter of this rank and its place in the whole model."""

    spec: ShardSpec
    parameter: torch.nn.Parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBuffer:
    """One buffer of this rank and its place in the whole model."""

    spec: ShardSpec
    buffer: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What decides names and global shapes besides the parameters themselves.

    ``prefix``: what canonical names begin with: nothing for the policy, ``critic.`` for the critic.
    """

    model: ModelConfig
    vocab_size: int
    prefix: str = ""

    @property
    def has_value_head(self) -> bool:
        """Whether the output layer gives a value instead of logits."""
        return bool(self.prefix)


def iterate_parameters(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, runtime: Runtime
) -> Iterator[LocalParameter]:
    """Every parameter of this rank with its canonical name and shard, in the order of the chunks and of each model."""
    for index, chunk in enumerate(chunks):
        for local_name, parameter in unwrapped(chunk).named_parameters():
            name = _canonical_name(local_name, index, shape, runtime)
            spec = _parameter_spec(name, parameter, shape, runtime)
            yield LocalParameter(spec=replace(spec, name=shape.prefix + name), parameter=parameter)


def iterate_state_buffers(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, runtime: Runtime
) -> Iterator[LocalBuffer]:
    """Every buffer of this rank that is state of the model, as the bias of experts is: persistent, of floats.

    That is what a checkpoint holds beside parameters. Megatron (0.16.1) splits none of them: each rank has the whole.
    """
    for index, chunk in enumerate(chunks):
        for path, module in unwrapped(chunk).named_modules():
            for own_name, buffer in module.named_buffers(recurse=False):
                # torch tells it in no other way that changes nothing: Megatron's ``state_dict`` may convert a buffer.
                if own_name in module._non_persistent_buffers_set or not buffer.is_floating_point():
                    continue
                name = _canonical_name(f"{path}.{own_name}" if path else own_name, index, shape, runtime)
                yield LocalBuffer(spec=whole(shape.prefix + name, tuple(buffer.shape)), buffer=buffer)


def _canonical_name(local_name: str, chunk_index: int, shape: ModelShape, runtime: Runtime) -> str:
    """Of a parameter or buffer of this rank's chunk, without the model's prefix."""
    num_experts = (shape.model.num_moe_experts or 0) // runtime.ep_size
    return canonical_parameter_name(
        local_name,
        layer_offset=layers_of_chunk(shape.model.num_layers, runtime, chunk_index).start,
        expert_offset=runtime.ep_rank * num_experts,
        tied_output=not shape.has_value_head and not shape.model.untie_embeddings_and_output_weights,
    )


def _parameter_spec(name: str, parameter: torch.nn.Parameter, shape: ModelShape, runtime: Runtime) -> ShardSpec:
    local_shape = tuple(parameter.shape)
    if shape.has_value_head and name in VALUE_HEAD:
        return whole(name, local_shape)
    if name in (WORD_EMBEDDINGS, OUTPUT_LAYER):
        return _vocab_spec(name, local_shape, shape.vocab_size, runtime.tp_rank)
    # Set by Megatron on the parameters it splits; experts are split over etp.
    rank, size = (runtime.etp_rank, runtime.etp_size) if _EXPERTS in name else (runtime.tp_rank, runtime.tp_size)
    if not getattr(parameter, "tensor_model_parallel", False) and not (_EXPERTS in name and size > 1):
        return whole(name, local_shape)
    dim = partition_dim(parameter)
    if dim < 0 or size == 1:
        return whole(name, local_shape)
    global_shape = tuple(length * size if index == dim else length for index, length in enumerate(local_shape))
    num_parts = 2 if shape.model.swiglu and name.endswith(_GATED) else 1
    splits = even_split(dim, size=global_shape[dim], rank=rank, num_ranks=size, num_parts=num_parts)
    return ShardSpec(name=name, global_shape=global_shape, local_shape=local_shape, splits=splits)


def _vocab_spec(name: str, local_shape: tuple[int, ...], vocab_size: int, tp_rank: int) -> ShardSpec:
    rows = local_shape[0]
    start = tp_rank * rows
    length = max(0, min(rows, vocab_size - start))
    return ShardSpec(
        name=name,
        global_shape=(vocab_size, *local_shape[1:]),
        local_shape=local_shape,
        splits=(Split(dim=0, blocks=(Block(local_start=0, global_start=start, length=length),) if length else ()),),
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
def load_initial_weights(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    runtime: Runtime,
    *,
    seed: int,
    perturbation: Perturbation | None = None,
) -> None:
    """Set this rank's parameters to its cut of the canonical initial weights; vocabulary padding becomes 0.

    ``perturbation``: moves the weights before they are rounded to the parameters' dtype.
    """
    for local in iterate_parameters(chunks, shape, runtime):
        spec, parameter = local.spec, local.parameter
        full = canonical_initial_weight(spec.name, spec.global_shape, model=shape.model, seed=seed)
        weight = cut_shard(full, spec)
        parameter.copy_(weight if perturbation is None else perturbation.of_weight(weight, spec, parameter.dtype))
