"""Places each parameter and buffer of this rank in the whole model, and makes and digests the canonical initial
weights.

Initial weights are made by canonical name and full shape, then cut: no layout changes a single bit of them. Values come
from NumPy's Philox generator keyed by the name, so they depend neither on the order of construction, nor on any global
random state, nor on the processor's vector width.

With ``model.hf_checkpoint`` they are the values in its files instead, each rank's part alone; only a critic's head is
still made here. Their digest is ``hf_source``'s.

Contract of the digest: two runs have the same one exactly if their canonical initial weights are the same. It covers
every parameter's canonical name, global shape and values. A tensor of more than 2^20 elements is not made as a whole:
all its values are a pure function of the random generator's key (from seed and name) and of the standard deviation. Its
first values show the key, and are hashed with ``init_method_std``, the source of the standard deviation. Neither
layout, nor precision, nor padding of the vocabulary changes a canonical weight, and so the digest.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import ExitStack

import numpy as np
import torch

from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.parameters import iterate_parameters
from mock_scheduler.megatron.perturbation import Perturbation
from mock_scheduler.support.digests import canonical_json
from mock_scheduler.support.tensor_bytes import compute_tensor_digest
from mock_scheduler.trace.shards import cut_shard
from pipelines.config.model import ModelConfig
from pipelines.megatron.hf_source import find_weight_files
from pipelines.megatron.parameter_shapes import Shape, parameter_shapes

# Megatron scales the initialisation of the two layers that write to the residual stream by depth
# (megatron/core/utils.py, scaled_init_method_normal).
_RESIDUAL_WRITERS = ("self_attention.linear_proj.weight", "linear_fc2.weight")


def canonical_initial_weight(name: str, shape: tuple[int, ...], *, model: ModelConfig, seed: int) -> torch.Tensor:
    """Returns float32 ``[*shape]``: the initial value of the parameter ``name``, the same in every layout.

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
    """Set this rank's parameters to its part of the initial weights; vocabulary padding becomes 0.

    ``perturbation``: moves the weights before they are rounded to the parameters' dtype. Raises ``ConfigError`` where
    the files of a Hugging Face checkpoint do not hold the model.
    """
    with ExitStack() as closing:
        files = None if model.hf_checkpoint is None else closing.enter_context(find_weight_files(model))
        for local in iterate_parameters(observed):
            spec, parameter = local.spec, local.parameter
            name = spec.name.removeprefix(observed.prefix)
            is_value_head = name.startswith(_OUTPUT) and spec.global_shape[0] == 1
            if files is not None and not is_value_head:
                weight = files.read(spec, name)
            else:
                full = canonical_initial_weight(spec.name, spec.global_shape, model=model, seed=seed)
                weight = cut_shard(full, spec)
            parameter.copy_(weight if perturbation is None else perturbation.of_weight(weight, spec, parameter.dtype))


_OUTPUT = "output_layer."

_WHOLE_ELEMENTS = 2**20
_SAMPLE_ELEMENTS = 2**12


def compute_initial_weights_digest(model: ModelConfig, *, vocab_size: int, sequence_length: int, seed: int) -> str:
    """Returns SHA-256 (hex) of the canonical initial weights; arguments as in ``parameter_shapes``."""
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
