"""Megatron's parameters under the names Hugging Face gives them in models like LLaMA, Qwen2, Qwen3 and Qwen3-MoE.

Contract: a Hugging Face tensor is a choice of rows of one of Megatron's whole tensors (canonical name and shape), never
a computation, so it can be cut from a rank's shard just as well. Layouts: ``linear_qkv`` has for each query group
its query heads, then its key and its value head (Megatron-core 0.16.1, ``transformer/attention.py``); ``linear_fc1`` of
a gated MLP has all gate rows, then all up rows (``transformer/mlp.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.text import list_some

_MAX_LISTED = 8
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")
_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "decoder.final_layernorm.bias": "model.norm.bias",
}
_IN_LAYER = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.router": "mlp.gate",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLayout:
    """Decides how Megatron's fused tensors are cut: query heads, query groups, and whether MLPs are gated."""

    num_heads: int
    num_query_groups: int
    is_gated: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NamedRows:
    """A tensor by another name: rows int64 ``[n]`` of the whole Megatron tensor, in its order; None: all of them."""

    name: str
    rows: torch.Tensor | None = None


def hugging_face_rows(name: str, num_rows: int, layout: ModelLayout) -> list[NamedRows]:
    """The Hugging Face tensors a canonical Megatron parameter holds; empty where it has no such name.

    num_rows: of its whole tensor. A prefix like ``critic.`` is kept.
    """
    prefix = "critic." if name.startswith("critic.") else ""
    own = name.removeprefix(prefix)
    if own in _OUTSIDE:
        return [NamedRows(name=prefix + _OUTSIDE[own])]
    match = _LAYER.match(own)
    if match is None:
        return []
    stem, _, suffix = match[2].rpartition(".")
    return [
        NamedRows(name=f"{prefix}model.layers.{match[1]}.{part.name}.{suffix}", rows=part.rows)
        for part in _layer_rows(stem, num_rows, layout)
    ]


def _layer_rows(stem: str, num_rows: int, layout: ModelLayout) -> Iterator[NamedRows]:
    if stem in _IN_LAYER:
        yield NamedRows(name=_IN_LAYER[stem])
    elif stem == "self_attention.linear_qkv":
        yield from _attention_rows(num_rows, layout)
    else:
        expert = _EXPERT.match(stem)
        if expert is not None:
            yield from _mlp_rows(f"mlp.experts.{expert[1]}", expert[2], num_rows, layout)
        elif stem.startswith("mlp.shared_experts."):
            yield from _mlp_rows("mlp.shared_expert", stem.removeprefix("mlp.shared_experts."), num_rows, layout)
        elif stem.startswith("mlp."):
            yield from _mlp_rows("mlp", stem.removeprefix("mlp."), num_rows, layout)


def _attention_rows(num_rows: int, layout: ModelLayout) -> Iterator[NamedRows]:
    groups, heads = layout.num_query_groups, layout.num_heads // layout.num_query_groups
    head_size = num_rows // (layout.num_heads + 2 * groups)
    by_group = torch.arange(num_rows).view(groups, (heads + 2) * head_size)
    query, key, value = torch.split(by_group, [heads * head_size, head_size, head_size], dim=1)
    for part_name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", value)):
        yield NamedRows(name=f"self_attn.{part_name}", rows=rows.reshape(-1))


def _mlp_rows(parent: str, linear: str, num_rows: int, layout: ModelLayout) -> Iterator[NamedRows]:
    if linear == "linear_fc2":
        yield NamedRows(name=f"{parent}.down_proj")
    elif linear == "linear_fc1" and layout.is_gated:
        gate, up = torch.arange(num_rows).chunk(2)
        yield NamedRows(name=f"{parent}.gate_proj", rows=gate)
        yield NamedRows(name=f"{parent}.up_proj", rows=up)
    elif linear == "linear_fc1":
        yield NamedRows(name=f"{parent}.up_proj")


def matching_tensors(name: str, num_rows: int, pattern: str, layout: ModelLayout) -> list[NamedRows]:
    """Chooses the tensors of a canonical parameter by a pattern found in its own name or Hugging Face's."""
    named = [NamedRows(name=name), *hugging_face_rows(name, num_rows, layout)]
    return [item for item in named if re.search(pattern, item.name)]


def check_pattern(pattern: str, shapes: Mapping[str, tuple[int, ...]], layout: ModelLayout) -> None:
    """Raise ``ConfigError`` with some names where the pattern is found in none. shapes: by canonical name."""
    if any(matching_tensors(name, shape[0], pattern, layout) for name, shape in shapes.items()):
        return
    ours = list_some(list(shapes), _MAX_LISTED, ", ")
    theirs = [item.name for name, shape in shapes.items() for item in hugging_face_rows(name, shape[0], layout)]
    raise ConfigError(
        f"debug.target_param_pattern {pattern!r} matches no parameter of this model. Megatron's names: {ours}. "
        f"Hugging Face's: {list_some(theirs, _MAX_LISTED, ', ')}"
    )
