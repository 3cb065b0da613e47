"""Places each parameter and buffer of this rank in the whole model, by reading the built model alone.

Names within the language model have its own paths, whatever holds it; of a vision-language model all else keeps its
path in the chunk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear

from mock_scheduler.errors import TraceError
from mock_scheduler.megatron.observed_model import ObservedModel, language_model_path, strip_wrappers, unwrapped
from mock_scheduler.megatron.partition import packs_experts, split_dim
from mock_scheduler.trace.names import OUTPUT_LAYER, WORD_EMBEDDINGS, canonical_parameter_name
from mock_scheduler.trace.shards import Block, ShardSpec, Split, even_split, whole

# Gate and up halves of dense layers, shared experts, and experts one by one or grouped; and of an adapter's second
# factor, whose output is added to them, and of DoRA's lengths.
_GATED = re.compile(
    r"\.linear_fc1(?:(?:\.adapter\.linear_out|\.lora_B(?:\.\w+)?)?\.(?:weight|bias)|\.adapter\.weight_magnitude)$"
)
_EXPERTS = ".mlp.experts."


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalParameter:
    """Holds one parameter of this rank and its place in the whole model."""

    spec: ShardSpec
    parameter: torch.nn.Parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBuffer:
    """Holds one buffer of this rank and its place in the whole model."""

    spec: ShardSpec
    buffer: torch.Tensor


def layer_offset(gpt: GPTModel) -> int:
    """Returns the global number, from 0, of the first layer of a chunk; 0 for one without layers."""
    layers = list(gpt.decoder.layers)
    return int(layers[0].layer_number) - 1 if layers else 0


def mtp_offset(gpt: GPTModel) -> int:
    """Returns the global number, from 0, of the first prediction module (MTP) of a chunk; 0 for one without any."""
    block = gpt._modules.get("mtp")
    return 0 if block is None else int(next(iter(block.layers)).layer_number) - 1


def iterate_parameters(model: ObservedModel) -> Iterator[LocalParameter]:
    """Yields every parameter of this rank with its canonical name and shard, in the order of chunks and modules.

    Raises:
        TraceError: two parameters have one name, or a mark of Megatron's contradicts a layer.
    """
    seen: dict[str, str] = {}
    for chunk in model.chunks:
        gpt, path, inner = unwrapped(chunk), language_model_path(chunk), strip_wrappers(chunk)
        for local_name, parameter in inner.named_parameters():
            name = _name_in_chunk(local_name, path, gpt, model)
            if name in seen and local_name.endswith(OUTPUT_LAYER):
                continue  # a stage with MTP has an embedding of its own; Megatron (0.16.1) never uses this copy then
            if name in seen:
                raise TraceError(
                    f"{name}: the parameters {seen[name]} and {local_name} of this rank both have this name. Rename a "
                    "module, or report the model's layers: names are those of megatron-core 0.16.1 and 0.19.2"
                )
            seen[name] = local_name
            module = inner.get_submodule(local_name.rpartition(".")[0])
            spec = _parameter_spec(name, local_name.rpartition(".")[2], parameter, gpt, module, model)
            yield LocalParameter(spec=replace(spec, name=model.prefix + name), parameter=parameter)


def iterate_state_buffers(model: ObservedModel) -> Iterator[LocalBuffer]:
    """Yields every buffer of this rank that is state of the model, as the bias of experts is: persistent, of floats.

    A checkpoint holds the same beside parameters. Megatron (0.16.1) splits none of them: each rank has the whole.
    """
    for chunk in model.chunks:
        gpt, language = unwrapped(chunk), language_model_path(chunk)
        for path, module in strip_wrappers(chunk).named_modules():
            for own_name, buffer in module.named_buffers(recurse=False):
                # torch tells it in no other way that changes nothing: Megatron's ``state_dict`` may convert a buffer.
                if own_name in module._non_persistent_buffers_set or not buffer.is_floating_point():
                    continue
                name = _name_in_chunk(f"{path}.{own_name}" if path else own_name, language, gpt, model)
                yield LocalBuffer(spec=whole(model.prefix + name, tuple(buffer.shape)), buffer=buffer)


def has_value_head(gpt: GPTModel) -> bool:
    """Whether a chunk's last layer gives a value instead of logits."""
    if not gpt.post_process or isinstance(gpt.output_layer, ColumnParallelLinear):
        return False
    return int(gpt.output_layer.weight.shape[0]) == 1


def _name_in_chunk(local_name: str, language: str, gpt: GPTModel, model: ObservedModel) -> str:
    """Names a parameter or buffer of this rank's chunk, without the model's prefix; ``language``: where its GPT is."""
    if not local_name.startswith(language):
        return local_name
    num_experts = (model.config.num_moe_experts or 0) // model.ranks.ep_size
    return canonical_parameter_name(
        local_name.removeprefix(language),
        layer_offset=layer_offset(gpt),
        expert_offset=model.ranks.ep_rank * num_experts,
        mtp_offset=mtp_offset(gpt),
        tied_output=gpt.share_embeddings_and_output_weights,
    )


def _parameter_spec(
    name: str,
    own_name: str,
    parameter: torch.nn.Parameter,
    gpt: GPTModel,
    module: torch.nn.Module,
    model: ObservedModel,
) -> ShardSpec:
    local_shape, ranks = tuple(parameter.shape), model.ranks
    if name in (WORD_EMBEDDINGS, OUTPUT_LAYER) and not (name == OUTPUT_LAYER and has_value_head(gpt)):
        return _vocab_spec(name, local_shape, model.vocab_size, ranks.tp_rank)
    is_packed = packs_experts(module)
    cuts = [(0, ranks.ep_rank, ranks.ep_size, 1)] if is_packed else []
    dim = split_dim(module, own_name, parameter, name)
    if dim is not None:
        # Experts are split over etp.
        rank, size = (ranks.etp_rank, ranks.etp_size) if _EXPERTS in name else (ranks.tp_rank, ranks.tp_size)
        is_gated = model.config.gated_linear_unit and _GATED.search(name) is not None
        cuts.append((dim, rank, size, 2 if is_gated and dim == int(is_packed) else 1))
    global_shape, splits = list(local_shape), list[Split]()
    for dim, rank, size, num_parts in cuts:
        global_shape[dim] *= size
        splits += even_split(dim, size=global_shape[dim], rank=rank, num_ranks=size, num_parts=num_parts)
    return ShardSpec(name=name, global_shape=tuple(global_shape), local_shape=local_shape, splits=tuple(splits))


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
