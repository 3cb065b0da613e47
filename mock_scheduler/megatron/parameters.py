"""Places each parameter and buffer of this rank in the whole model, by reading the built model alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear

from mock_scheduler.megatron.marks import partition_dim
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.trace.names import OUTPUT_LAYER, WORD_EMBEDDINGS, canonical_parameter_name
from mock_scheduler.trace.shards import Block, ShardSpec, Split, even_split, whole

_GATED = ("linear_fc1.weight", "linear_fc1.bias")
_EXPERTS = ".mlp.experts."


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


def layer_offset(gpt: GPTModel) -> int:
    """The global number, from 0, of the first layer of a chunk; 0 for one without layers."""
    layers = list(gpt.decoder.layers)
    return int(layers[0].layer_number) - 1 if layers else 0


def iterate_parameters(model: ObservedModel) -> Iterator[LocalParameter]:
    """Yields every parameter of this rank with its canonical name and shard, in the order of chunks and modules."""
    for gpt in model.gpts():
        for local_name, parameter in gpt.named_parameters():
            name = _canonical_name(local_name, gpt, model)
            spec = _parameter_spec(name, parameter, gpt, model)
            yield LocalParameter(spec=replace(spec, name=model.prefix + name), parameter=parameter)


def iterate_state_buffers(model: ObservedModel) -> Iterator[LocalBuffer]:
    """Yields every buffer of this rank that is state of the model, as the bias of experts is: persistent, of floats.

    A checkpoint holds the same beside parameters. Megatron (0.16.1) splits none of them: each rank has the whole.
    """
    for gpt in model.gpts():
        for path, module in gpt.named_modules():
            for own_name, buffer in module.named_buffers(recurse=False):
                # torch tells it in no other way that changes nothing: Megatron's ``state_dict`` may convert a buffer.
                if own_name in module._non_persistent_buffers_set or not buffer.is_floating_point():
                    continue
                name = _canonical_name(f"{path}.{own_name}" if path else own_name, gpt, model)
                yield LocalBuffer(spec=whole(model.prefix + name, tuple(buffer.shape)), buffer=buffer)


def has_value_head(gpt: GPTModel) -> bool:
    """Whether a chunk's last layer gives a value instead of logits."""
    if not gpt.post_process or isinstance(gpt.output_layer, ColumnParallelLinear):
        return False
    return int(gpt.output_layer.weight.shape[0]) == 1


def _canonical_name(local_name: str, gpt: GPTModel, model: ObservedModel) -> str:
    """Of a parameter or buffer of this rank's chunk, without the model's prefix."""
    num_experts = (model.config.num_moe_experts or 0) // model.ranks.ep_size
    return canonical_parameter_name(
        local_name,
        layer_offset=layer_offset(gpt),
        expert_offset=model.ranks.ep_rank * num_experts,
        tied_output=gpt.share_embeddings_and_output_weights,
    )


def _parameter_spec(name: str, parameter: torch.nn.Parameter, gpt: GPTModel, model: ObservedModel) -> ShardSpec:
    local_shape, ranks = tuple(parameter.shape), model.ranks
    if name in (WORD_EMBEDDINGS, OUTPUT_LAYER) and not (name == OUTPUT_LAYER and has_value_head(gpt)):
        return _vocab_spec(name, local_shape, model.vocab_size, ranks.tp_rank)
    # Set by Megatron on the parameters it splits; experts are split over etp.
    rank, size = (ranks.etp_rank, ranks.etp_size) if _EXPERTS in name else (ranks.tp_rank, ranks.tp_size)
    if not getattr(parameter, "tensor_model_parallel", False) and not (_EXPERTS in name and size > 1):
        return whole(name, local_shape)
    dim = partition_dim(parameter)
    if dim < 0 or size == 1:
        return whole(name, local_shape)
    global_shape = tuple(length * size if index == dim else length for index, length in enumerate(local_shape))
    num_parts = 2 if model.config.gated_linear_unit and name.endswith(_GATED) else 1
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
