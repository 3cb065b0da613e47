"""Names parameters and modules canonically: the same for every layout and for both layer implementations.

A canonical name is the one that Megatron's local layer implementation gives in one process. Pipeline stages number
their layers from 0, wrappers add ``module.``, TransformerEngine fuses a norm into the linear layer following it,
adapters (LoRA) push a weight one module down, releases name the layer within a prediction module (MTP) differently,
and a tied output layer is the embedding under another name: all of these are undone here.
Names read from megatron-core 0.16.1 and 0.19.2 and TransformerEngine 2.20.2. A router's choices and its experts'
tensors are known by their names.
"""

from __future__ import annotations

import re
from dataclasses import replace

from mock_scheduler.trace.entries import DimName, TraceKey

#: The module that looks up a row of its weight for every token.
EMBEDDING = "embedding"
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
#: The module whose output the output layer gets.
FINAL_NORM = "decoder.final_layernorm"
#: How names of norms of gradients end, of traced ones and of metrics; and that of the clip by a norm.
GRADIENT_NORM, CLIP = "grad_norm", "clip"

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..+)?$")
_EXPERT = re.compile(r"^(.+\.mlp\.experts\.local_experts\.)(\d+)(\..+)$")
# TransformerEngine's grouped linear layer numbers its experts at the parameter.
_GROUPED_EXPERT = re.compile(r"(?<=\.mlp\.)(experts\.)(linear_fc[12])\.(weight|bias)(\d+)$")
_PREDICTION_MODULE = re.compile(r"^(mtp\.layers\.)(\d+)(\..+)?$")
# megatron-core 0.19 has another name than 0.16 for the transformer layer within.
_PREDICTION_LAYER = re.compile(r"^(mtp\.layers\.\d+\.)mtp_model_layer(?=\.|$)")
_WRAPPER = re.compile(r"^(?:module\.)+")
# Megatron-Bridge's adapters wrap a linear layer as ``to_wrap``, those in PEFT's form as ``base_layer``.
_ADAPTED = re.compile(r"\.(?:to_wrap|base_layer)(?=\.|$)")
_FUSED_NORMS = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r".input_layernorm.\1"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r".pre_mlp_layernorm.\1"),
    (re.compile(r"\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$"), r".\1_layernorm.\2"),
)


def canonical_parameter_name(
    name: str, *, layer_offset: int = 0, expert_offset: int = 0, mtp_offset: int = 0, tied_output: bool = False
) -> str:
    """Returns the layout-independent name of the parameter a rank calls ``name``.

    ``layer_offset``: global index of the first layer of the rank's chunk. ``expert_offset``: global index of the rank's
    first expert. ``mtp_offset``: global index of the chunk's first prediction module. ``tied_output``: the model shares
    its embedding with its output layer, so the output layer's weight on the last stage is a second holder of the
    embedding.
    """
    name = _ADAPTED.sub("", _WRAPPER.sub("", name))
    for pattern, replacement in _FUSED_NORMS:
        name = pattern.sub(replacement, name)
    name = _GROUPED_EXPERT.sub(r"\1local_experts.\4.\2.\3", name)
    name = _numbered(_EXPERT, name, expert_offset)
    if tied_output and name == OUTPUT_LAYER:
        return WORD_EMBEDDINGS
    return _number_layers(name, layer_offset, mtp_offset)


def canonical_module_name(name: str, *, layer_offset: int = 0, mtp_offset: int = 0) -> str:
    """The layout-independent name of the module a rank calls ``name``; ``decoder.layers.3`` is a whole layer.

    ``layer_offset``: global index of the first layer of the rank's chunk; ``mtp_offset``: of its first prediction
    module. Both implementations name alike the modules whose outputs can be seen; a norm TransformerEngine has fused
    into a linear layer is none.
    """
    return _number_layers(_WRAPPER.sub("", name), layer_offset, mtp_offset)


def _number_layers(name: str, layer_offset: int, mtp_offset: int) -> str:
    name = _numbered(_LAYER, name, layer_offset)
    return _PREDICTION_LAYER.sub(r"\1transformer_layer", _numbered(_PREDICTION_MODULE, name, mtp_offset))


def _numbered(pattern: re.Pattern[str], name: str, offset: int) -> str:
    """A name whose number in the pattern's second group is counted from ``offset``."""
    found = pattern.match(name)
    return name if found is None else f"{found[1]}{int(found[2]) + offset}{found[3] or ''}"


#: What follows the name of the part that both belong to.
_ROUTER, _EXPERTS = ".router", ".experts"
_CHOICE, _LOGITS = "chosen_experts", "logits"


def is_choice(key: TraceKey) -> bool:
    """Whether a tensor lists the experts each token chose: integers ``[T, slots]``."""
    return key.kind == "router" and key.name.endswith(f"{_ROUTER}.{_CHOICE}")


def logits_key(choice: TraceKey) -> TraceKey:
    """Returns the key of the router's logits ``[T, experts]``, from which the choice was made."""
    return replace(choice, name=choice.name.removesuffix(_CHOICE) + _LOGITS)


def is_by_slot(dims: tuple[DimName, ...]) -> bool:
    """Whether a tensor is stored in the order of each token's chosen experts."""
    return dims[:2] == ("token", "slot")


def routed_part(name: str) -> str:
    """Returns the part of the model that a router and its experts belong to: ``decoder.layers.1.mlp``."""
    for inside in (_ROUTER, _EXPERTS):
        name = name.partition(inside)[0]
    return name
