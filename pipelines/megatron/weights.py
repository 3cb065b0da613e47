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
from collections.abc import Iterator

import numpy as np
import torch

from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.parameters import iterate_parameters
from mock_scheduler.megatron.perturbation import Perturbation
from mock_scheduler.support.digests import canonical_json
from mock_scheduler.support.tensor_bytes import compute_tensor_digest
from mock_scheduler.trace.names import OUTPUT_LAYER, WORD_EMBEDDINGS
from mock_scheduler.trace.shards import cut_shard
from pipelines.config.model import ModelConfig

# Megatron scales the initialisation of the two layers that write to the residual stream by depth
# (megatron/core/utils.py, scaled_init_method_normal).
_RESIDUAL_WRITERS = ("self_attention.linear_proj.weight", "linear_fc2.weight")


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
    observed: ObservedModel, model: ModelConfig, *, seed: int, perturbation: Perturbation | None = None
) -> None:
    """Set this rank's parameters to its cut of the canonical initial weights; vocabulary padding becomes 0.

    ``perturbation``: moves the weights before they are rounded to the parameters' dtype.
    """
    for local in iterate_parameters(observed):
        spec, parameter = local.spec, local.parameter
        full = canonical_initial_weight(spec.name, spec.global_shape, model=model, seed=seed)
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
