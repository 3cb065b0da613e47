"""Canonical names of parameters and modules: the same for every layout and for both layer implementations.

A canonical name is the one that Megatron's local layer implementation gives in one process. Pipeline stages number
their layers from 0, wrappers add ``module.``, TransformerEngine fuses a norm into the linear layer following it,
and a tied output layer is the embedding under another name: all of these are undone here.
Names read from megatron-core 0.16.1 and 0.19.2 and TransformerEngine 2.20.2.
"""

from __future__ import annotations

import re

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..+)$")
_LAYER_OR_MODULE = re.compile(r"^(decoder\.layers\.)(\d+)(\..+)?$")
_EXPERT = re.compile(r"^(.+\.mlp\.experts\.local_experts\.)(\d+)(\..+)$")
# TransformerEngine's grouped linear layer numbers its experts at the parameter.
_GROUPED_EXPERT = re.compile(r"(?<=\.mlp\.)(experts\.)(linear_fc[12])\.(weight|bias)(\d+)$")
_WRAPPER = re.compile(r"^(?:module\.)+")
_FUSED_NORMS = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r".input_layernorm.\1"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r".pre_mlp_layernorm.\1"),
)


def canonical_parameter_name(
    name: str, *, layer_offset: int = 0, expert_offset: int = 0, tied_output: bool = False
) -> str:
    """The layout-independent name of the parameter a rank calls ``name``.

    ``layer_offset``: global index of the first layer of the rank's chunk. ``expert_offset``: global index of the rank's
    first expert. ``tied_output``: the model shares its embedding with its output layer, so the output layer's
    weight on the last stage is a second holder of the embedding.
    """
    name = _WRAPPER.sub("", name)
    for pattern, replacement in _FUSED_NORMS:
        name = pattern.sub(replacement, name)
    name = _GROUPED_EXPERT.sub(r"\1local_experts.\4.\2.\3", name)
    expert = _EXPERT.match(name)
    if expert is not None:
        name = f"{expert[1]}{int(expert[2]) + expert_offset}{expert[3]}"
    if tied_output and name == OUTPUT_LAYER:
        return WORD_EMBEDDINGS
    layer = _LAYER.match(name)
    if layer is None:
        return name
    return f"{layer[1]}{int(layer[2]) + layer_offset}{layer[3]}"


def canonical_module_name(name: str, *, layer_offset: int = 0) -> str:
    """The layout-independent name of the module a rank calls ``name``; ``decoder.layers.3`` is a whole layer.

    ``layer_offset``: global index of the first layer of the rank's chunk. Both implementations name alike the modules
    whose outputs can be seen; a norm TransformerEngine has fused into a linear layer is none.
    """
    name = _WRAPPER.sub("", name)
    layer = _LAYER_OR_MODULE.match(name)
    if layer is None:
        return name
    return f"{layer[1]}{int(layer[2]) + layer_offset}{layer[3] or ''}"
