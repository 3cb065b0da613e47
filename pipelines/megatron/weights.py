"""Places each parameter and buffer of this rank in the whole model, and makes and digests the canonical initial
weights.

Initial weights are made by canonical name and full shape, then cut: no layout changes a single bit of them. Values come
from NumPy's Philox generator keyed by the name, so they depend neither on the order of construction, nor on any global
random state, nor on the processor's vector width.

Contract of the digest: two runs have the same one exactly if their canonical initial weights are the same. It covers
every parameter's canonical name, global shape and values. A tensor of more than 2^20 elements is not made as a whole:
all its values are a pure function of the random generator's key (from seed and name) and of the standard deviation. Its
first values show the key, and are hashed with ``init_method_std``, the source of the standard deviation. Neither
layout, nor precision, nor padding of the vocabulary changes a canonical weight, and so the digest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mock_scheduler.support.digests import canonical_json, compute_tensor_digest
from mock_scheduler.trace.names import OUTPUT_LAYER, WORD_EMBEDDINGS, canonical_parameter_name
from mock_scheduler.trace.shards import Block, ShardSpec, Split, cut_shard, even_split, whole
from pipelines.config.model import ModelConfig
from pipelines.megatron.layers.repairs import partition_dim
from pipelines.megatron.model import layers_of_chunk, unwrapped
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
    """The facts behind names and global shapes besides the parameters themselves.

    ``prefix``: the beginning of canonical names: empty for the policy, ``critic.`` for the critic.
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
    """Yields every buffer of this rank that is state of the model, as the bias of experts is: persistent, of floats.

    A checkpoint holds the same beside parameters. Megatron (0.16.1) splits none of them: each rank has the whole.
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
    # Drawn and scaled in float64, rounded once.
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


Shape = tuple[int, ...]

_WHOLE_ELEMENTS = 2**20
_SAMPLE_ELEMENTS = 2**12


def parameter_shapes(model: ModelConfig, *, vocab_size: int, sequence_length: int) -> dict[str, Shape]:
    """Every parameter's global shape by its canonical name, in the order of Megatron's ``GPTModel``.

    ``vocab_size``: unpadded. ``sequence_length``: the number of learned positions, where the model has them.
    """
    shapes: dict[str, Shape] = {WORD_EMBEDDINGS: (vocab_size, model.hidden_size)}
    if model.position_embedding_type == "learned_absolute":
        shapes["embedding.position_embeddings.weight"] = (sequence_length, model.hidden_size)
    for layer in range(model.num_layers):
        shapes |= {f"decoder.layers.{layer}.{name}": shape for name, shape in _layer_shapes(model, layer)}
    shapes |= dict(_norm_shapes("decoder.final_layernorm", model.hidden_size, model))
    if model.untie_embeddings_and_output_weights:
        shapes[OUTPUT_LAYER] = (vocab_size, model.hidden_size)
    return shapes


def compute_initial_weights_digest(model: ModelConfig, *, vocab_size: int, sequence_length: int, seed: int) -> str:
    """SHA-256 (hex) of the canonical initial weights; arguments as in ``parameter_shapes``."""
    digest = hashlib.sha256()
    shapes = parameter_shapes(model, vocab_size=vocab_size, sequence_length=sequence_length)
    for name, shape in sorted(shapes.items()):
        entry = [name, list(shape), *_values(name, shape, model=model, seed=seed)]
        digest.update(f"{canonical_json(entry)}\n".encode())
    return digest.hexdigest()


def _values(name: str, shape: Shape, *, model: ModelConfig, seed: int) -> list[str | float]:
    """Stands for a parameter's values: their digest, or the first ones' with the number that all others follow from."""
    if math.prod(shape) <= _WHOLE_ELEMENTS:
        return [compute_tensor_digest(canonical_initial_weight(name, shape, model=model, seed=seed))]
    first = canonical_initial_weight(name, (_SAMPLE_ELEMENTS,), model=model, seed=seed)
    return [compute_tensor_digest(first), model.init_method_std]


def _layer_shapes(model: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, head = model.hidden_size, model.hidden_size // model.num_attention_heads
    qkv = (model.num_attention_heads + 2 * model.query_groups) * head
    has_bias = model.add_bias_linear
    yield from _norm_shapes("input_layernorm", hidden, model)
    yield from _linear_shapes("self_attention.linear_proj", (hidden, hidden), has_bias=has_bias)
    yield from _linear_shapes("self_attention.linear_qkv", (qkv, hidden), has_bias=has_bias or model.add_qkv_bias)
    if model.qk_layernorm:
        yield from _norm_shapes("self_attention.q_layernorm", head, model)
        yield from _norm_shapes("self_attention.k_layernorm", head, model)
    yield from _norm_shapes("pre_mlp_layernorm", hidden, model)
    if model.moe_layers[layer]:
        yield from _expert_shapes(model)
    else:
        yield from _mlp_shapes("mlp", model.ffn_size, model)


def _mlp_shapes(name: str, inner: int, model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    fc1, hidden = inner * (2 if model.swiglu else 1), model.hidden_size
    yield from _linear_shapes(f"{name}.linear_fc1", (fc1, hidden), has_bias=model.add_bias_linear)
    yield from _linear_shapes(f"{name}.linear_fc2", (hidden, inner), has_bias=model.add_bias_linear)


def _expert_shapes(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    num_experts = model.num_moe_experts or 0
    yield from _linear_shapes("mlp.router", (num_experts, model.hidden_size), has_bias=model.add_bias_linear)
    for expert in range(num_experts):
        yield from _mlp_shapes(f"mlp.experts.local_experts.{expert}", model.expert_ffn_size, model)
    if model.moe_shared_expert_intermediate_size is not None:
        yield from _mlp_shapes("mlp.shared_experts", model.moe_shared_expert_intermediate_size, model)


def _norm_shapes(name: str, size: int, model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (size,)
    if model.normalization == "LayerNorm":
        yield f"{name}.bias", (size,)


def _linear_shapes(name: str, shape: Shape, *, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    if has_bias:
        yield f"{name}.bias", shape[:1]
