"""Says which rows of Hugging Face's tensors each of Megatron's parameters is made of, in both directions.

Contract: every reshape between the two is a choice of whole rows, so that one table serves reading, of any part, and
writing. Names are canonical ones (``mock_scheduler.trace.names``), shapes those of whole tensors. Queries, keys and
values stand group by group in Megatron's tensor, and gate and up projection one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mock_scheduler.adapters.huggingface.architectures import HuggingFaceModel
from mock_scheduler.trace.names import OUTPUT_LAYER, WORD_EMBEDDINGS

Shape = tuple[int, ...]

_TOP = {
    WORD_EMBEDDINGS: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    OUTPUT_LAYER: "lm_head.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_expert.down_proj.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
_GATED = {
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.shared_experts.linear_fc1.weight": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
}
_QKV = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_ROUTER = "mlp.router.weight"


@dataclass(frozen=True, slots=True)
class Rows:
    """``length`` rows of a tensor of Hugging Face's from ``start`` on."""

    tensor: str
    start: int
    length: int


def rows_of(name: str, num_rows: int, model: HuggingFaceModel) -> tuple[Rows, ...]:
    """Lists the rows that stand one after another in the parameter ``name``; none for a parameter of no such model."""
    if name in _TOP:
        return (Rows(_TOP[name], 0, num_rows),)
    found = _LAYER.fullmatch(name)
    if found is None:
        return ()
    layer, part = f"model.layers.{found[1]}.", found[2]
    if part in _IN_LAYER:
        return (Rows(layer + _IN_LAYER[part], 0, num_rows),)
    if part in _GATED:
        return _halves(layer, _GATED[part], num_rows)
    qkv = _QKV.fullmatch(part)
    if qkv is not None:
        return tuple(_query_key_value(layer, qkv[1], num_rows, model))
    return _rows_of_experts(layer, part, num_rows, model)


def _rows_of_experts(layer: str, part: str, num_rows: int, model: HuggingFaceModel) -> tuple[Rows, ...]:
    names, expert = model.architecture.experts, _EXPERT.fullmatch(part)
    if names is None:
        return ()
    if part == _ROUTER:
        return (Rows(f"{layer}{names.block}.gate.weight", 0, num_rows),)
    if expert is None:
        return ()
    own = f"{layer}{names.block}.experts.{expert[1]}."
    if expert[2] == "1":
        return _halves(own, (f"{names.gate}.weight", f"{names.up}.weight"), num_rows)
    return (Rows(f"{own}{names.down}.weight", 0, num_rows),)


def _halves(layer: str, tensors: tuple[str, str], num_rows: int) -> tuple[Rows, ...]:
    return tuple(Rows(layer + tensor, 0, num_rows // 2) for tensor in tensors)


def _query_key_value(layer: str, kind: str, num_rows: int, model: HuggingFaceModel) -> Iterator[Rows]:
    """Yields the rows of each group: its queries, then its key, then its value."""
    head = num_rows // (model.num_heads + 2 * model.num_groups)
    queries = head * (model.num_heads // model.num_groups)
    for group in range(model.num_groups):
        for projection, length in (("q", queries), ("k", head), ("v", head)):
            yield Rows(f"{layer}self_attn.{projection}_proj.{kind}", group * length, length)


@dataclass(frozen=True, slots=True)
class Place:
    """Rows of a parameter, and of a tensor of Hugging Face's, that are the same."""

    name: str
    own_start: int
    rows: Rows


def list_tensors(
    shapes: Mapping[str, Shape], model: HuggingFaceModel
) -> tuple[dict[str, Shape], dict[str, list[Place]]]:
    """Lists the tensors of a model with these parameters: the shape of each, and where its rows are.

    Raises:
        KeyError: a parameter is of no model that Hugging Face names.
    """
    found: dict[str, Shape] = {}
    places: dict[str, list[Place]] = {}
    for name, shape in shapes.items():
        own_start = 0
        parts = rows_of(name, shape[0], model)
        if not parts:
            raise KeyError(name)
        for rows in parts:
            stop = max(rows.start + rows.length, *found.get(rows.tensor, (0,))[:1])
            found[rows.tensor] = (stop, *shape[1:])
            places.setdefault(rows.tensor, []).append(Place(name, own_start, rows))
            own_start += rows.length
    return found, places
