"""The order in which a training step computes the tensors of a trace.

Contract: names are canonical, so the order does not depend on the layout. Parts of a layer are those of megatron-core
0.16.1 and 0.19.2 in the order of their forward pass; a module's own output comes after its parts. Names with a prefix,
as ``critic.``, stand beside the policy's. Unknown names come after known ones beside them. A tensor whose trace states
its place stands there, whatever its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from mock_scheduler.config.instruments import TRACE_KINDS
from mock_scheduler.support.text import natural_part
from mock_scheduler.trace.entries import PHASES, Phase, TraceKey

_LAYER = re.compile(r"\blayers\.(\d{1,9})(?:\.(.+))?$")
_BEFORE_LAYERS = re.compile(r"\bembedding\b")
_EXPERT = re.compile(r"\blocal_experts\.(\d{1,9})\b")
_NUMBER = re.compile(r"(\d+)")
#: Stages of the model.
_EMBEDDING, _LAYERS, _AFTER_LAYERS = (0, 1, 2)

#: The parts of a transformer layer in the order of the forward pass. Longer names win over those that they begin with.
_LAYER_PARTS = (
    "embedding",
    "enorm",
    "hnorm",
    "eh_proj",
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention",
    "pre_mlp_layernorm",
    "mlp.shared_experts",
    "mlp.router.weight",
    "mlp.router.logits",
    # The probabilities are those of the experts that were chosen.
    "mlp.router.chosen_experts",
    "mlp.router.probs",
    "mlp.router",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "mlp.experts",
    "mlp",
    "transformer_layer",
    "final_layernorm",
    "output_layer",
)
#: What comes after the layers, and what is made of tokens without a layer, in the order of a step. ``None`` stands for
#: every other name.
_OUTER_NAMES = (
    "tokens",
    "labels",
    "loss_mask",
    "response_mask",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "final_layernorm",
    None,
    "output_layer",
    "logits",
    "logprobs",
    "entropy",
    "values",
    "advantages",
    "returns",
    "lm_loss",
    "ratio",
    "pg_loss",
    "vf_loss",
    "kl_loss",
    "total_loss",
)
#: Sums over tokens, which are computed last.
_MEAN = re.compile(r"\bmean\.")

#: Behind every phase of an update.
BOOKKEEPING = Phase.UPDATE + 1

_Place = tuple[int, ...]
_NaturalName = tuple[tuple[int, str], ...]


def order_keys(keys: Iterable[TraceKey]) -> list[TraceKey]:
    """Sorts trace keys in the order training computes them.

    Step by step, update by update, phase by phase (``phase_of``). Kinds of one phase are interleaved by
    their place in the model; in ``Phase.BACKWARD`` from the output to the embedding.
    """
    return sorted(keys, key=_key_position)


def phase_of(key: TraceKey) -> int:
    """Returns the place of a tensor's phase within its update: ``PHASES``; behind all of them for means of a pass.

    Tensors whose trace states their places have one phase.
    """
    if key.place is not None:
        return Phase.FORWARD  # one for all: their places say what comes first
    # Means are bookkeeping: recomputation may count twice, and nothing is computed from them.
    return BOOKKEEPING if key.kind == "loss" and _MEAN.search(key.name) else PHASES[key.kind]


def _key_position(key: TraceKey) -> tuple[int, int, int, _Place, int, _NaturalName]:
    phase = phase_of(key)
    place, name = _execution_position(key.name)
    if key.place is not None:
        place = (key.place,)  # as the writer of the trace counted it
    elif phase is Phase.BACKWARD:
        # The backward pass goes through the same model the other way round.
        place = tuple(-number for number in place)
        name = tuple((-number, text) for number, text in name)
    return key.step, key.update, phase, place, TRACE_KINDS.index(key.kind), name


@lru_cache(maxsize=1 << 16)
def _execution_position(name: str) -> tuple[_Place, _NaturalName]:
    """Returns the place in the model, and the name with its numbers as numbers."""
    natural = tuple(natural_part(text) for text in _NUMBER.split(name) if text)
    layer = _LAYER.search(name)
    if layer is not None:
        # The layers that predict further tokens run after the decoder's.
        stage = _AFTER_LAYERS if re.search(r"\bmtp\b", name) else _LAYERS
        outer = _OUTER_NAMES.index(None) if stage == _AFTER_LAYERS else 0
        part = layer[2] and layer[2].removeprefix("transformer_layer.")
        return (stage, outer, int(layer[1]), *_layer_place(part)), natural
    if _BEFORE_LAYERS.search(name):
        return (_EMBEDDING, 0, 0, 0, 0, 0), natural
    return (_AFTER_LAYERS, _outer_place(name), 0, 0, 0, 0), natural


def _layer_place(part: str | None) -> tuple[int, int, int]:
    """Returns the place of a layer's part, whether it is the output of a whole module with parts, and the expert."""
    if part is None:
        # A name without a part is the layer's own output, behind all of its parts.
        return len(_LAYER_PARTS) + 1, 0, 0
    found = max((item for item in _LAYER_PARTS if f"{part}.".startswith(f"{item}.")), key=len, default=None)
    if found is None:
        # A part that no table knows stands behind the known ones, so that what is known stays the first divergence.
        return len(_LAYER_PARTS), 0, 0
    inside = part[len(found) + 1 :]
    has_parts = any(item.startswith(f"{found}.") for item in _LAYER_PARTS) or found.endswith("experts")
    expert = _EXPERT.search(inside)
    # The output of a module with parts comes after them.
    return _LAYER_PARTS.index(found), int(has_parts and not inside), int(expert[1]) if expert else 0


def _outer_place(name: str) -> int:
    if _MEAN.search(name):
        return len(_OUTER_NAMES) + 1
    words = name.split(".")
    known = [place for place, item in enumerate(_OUTER_NAMES) if item in words]
    return known[0] if known else _OUTER_NAMES.index(None)
