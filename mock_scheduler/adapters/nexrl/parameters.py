"""Parameters in a debug dump: Hugging Face's names for Megatron's, a rank's part of one, and the whole of all parts.

Contract: a Hugging Face tensor is a choice of rows of one of Megatron's whole tensors (canonical name and shape), never
a computation, so it can be cut from a rank's shard just as well. Models are like LLaMA, Qwen2, Qwen3 and Qwen3-MoE.
Layouts: ``linear_qkv`` has for each query group its query heads, then its key and its value head (Megatron-core 0.16.1,
``transformer/attention.py``); ``linear_fc1`` of a gated MLP has all gate rows, then all up rows
(``transformer/mlp.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.support.tensor_bytes import dtype_name
from mock_scheduler.support.text import list_some
from mock_scheduler.trace.geometry import places_along
from mock_scheduler.trace.shards import ShardSpec, owned_mask

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
    # Within a query group lie its query heads, then one key head, then one value head.
    by_group = torch.arange(num_rows).view(groups, (heads + 2) * head_size)
    query, key, value = torch.split(by_group, [heads * head_size, head_size, head_size], dim=1)
    for part_name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", value)):
        yield NamedRows(name=f"self_attn.{part_name}", rows=rows.reshape(-1))


def _mlp_rows(parent: str, linear: str, num_rows: int, layout: ModelLayout) -> Iterator[NamedRows]:
    if linear == "linear_fc2":
        yield NamedRows(name=f"{parent}.down_proj")
    elif linear == "linear_fc1" and layout.is_gated:
        # All gate rows come before all up rows in the whole tensor, though not in a rank's shard.
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """A rank's part of a named tensor.

    tensor: ``[n, ...]``, the rank's entries only. indices: of each dimension, int64 where its entries lie in the whole
    tensor; None: it is held whole, in order. owned: bool of the tensor's shape, True where this rank's value counts;
    None: everywhere.
    """

    name: str
    global_shape: tuple[int, ...]
    tensor: torch.Tensor
    indices: tuple[torch.Tensor | None, ...]
    owned: torch.Tensor | None = None


def cut_piece(named: NamedRows, spec: ShardSpec, local: torch.Tensor) -> Piece | None:
    """The part of a named tensor a shard holds; None where that is nothing.

    local: ``[*spec.local_shape]``, or flat with just the elements of ``spec.flat_range``.
    """
    whole_local = _unflatten(local, spec)
    owned = None if spec.flat_range is None else owned_mask(spec)
    num_rows = spec.global_shape[0] if named.rows is None else len(named.rows)
    indices: list[torch.Tensor | None] = []
    for dim in range(len(spec.global_shape)):
        local_places, global_places = places_along(spec, dim)
        if dim == 0:
            local_places, global_places = _choose_rows(named.rows, local_places, global_places)
        whole_local = whole_local.index_select(dim, local_places)
        owned = None if owned is None else owned.index_select(dim, local_places)
        size = num_rows if dim == 0 else spec.global_shape[dim]
        is_whole = len(global_places) == size and bool((global_places == torch.arange(size)).all())
        indices.append(None if is_whole else global_places)
    if whole_local.numel() == 0 or (owned is not None and not bool(owned.any())):
        return None
    return Piece(
        name=named.name,
        global_shape=(num_rows, *spec.global_shape[1:]),
        tensor=whole_local,
        indices=tuple(indices),
        owned=None if owned is None or bool(owned.all()) else owned,
    )


def _unflatten(local: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """The local tensor in its shape; elements outside of ``flat_range`` are 0 where only the range was given."""
    if tuple(local.shape) == spec.local_shape:
        return local.detach().cpu()
    assert spec.flat_range is not None  # the only other form that a shard has
    start, stop = spec.flat_range
    filled = torch.zeros(spec.local_shape, dtype=local.dtype)
    filled.view(-1)[start:stop] = local.detach().cpu().reshape(-1)
    return filled


def _choose_rows(
    rows: torch.Tensor | None, local_places: torch.Tensor, global_places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses rows among those of a shard: their local places, and their numbers among the chosen rows."""
    if rows is None:
        return local_places, global_places
    local_of = {place: local for local, place in zip(local_places.tolist(), global_places.tolist(), strict=True)}
    held = [(local_of[row], number) for number, row in enumerate(rows.tolist()) if row in local_of]
    pairs = torch.tensor(held, dtype=torch.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MergedPieces:
    """The whole tensor; absent: bool of its shape, True where no piece has a value. num_conflicts: elements a
    further rank holds with another value than the first, whose value counts."""

    tensor: torch.Tensor
    absent: torch.Tensor
    num_conflicts: int


def merge_pieces(pieces: Sequence[Piece], *, where: str) -> MergedPieces:
    """The whole tensor out of all ranks' pieces of one name, at least one.

    Raises ``TraceError`` (its message begins with ``where``) for pieces of several shapes or dtypes.
    """
    forms = {(piece.global_shape, piece.tensor.dtype) for piece in pieces}
    if len(forms) > 1:
        listed = ", ".join(sorted(f"{dtype_name(dtype)} {list(shape)}" for shape, dtype in forms))
        raise TraceError(f"{where}: its parts are of several forms: {listed}")
    merged = torch.zeros(pieces[0].global_shape, dtype=pieces[0].tensor.dtype)
    absent = torch.ones(pieces[0].global_shape, dtype=torch.bool)
    num_conflicts = 0
    for piece in pieces:
        sizes = piece.global_shape
        places = [torch.arange(size) if at is None else at for at, size in zip(piece.indices, sizes, strict=True)]
        grid = torch.meshgrid(*places, indexing="ij")
        is_owned = torch.ones(piece.tensor.shape, dtype=torch.bool) if piece.owned is None else piece.owned
        there, was_absent = merged[grid], absent[grid]
        # NaN equals NaN here, as in the whole comparison of dumps.
        are_nan = there.isnan() & piece.tensor.isnan()
        num_conflicts += int((is_owned & ~was_absent & (there != piece.tensor) & ~are_nan).sum())
        # The first rank's value counts.
        merged[grid] = torch.where(is_owned & was_absent, piece.tensor, there)
        absent[grid] = was_absent & ~is_owned
    return MergedPieces(tensor=merged, absent=absent, num_conflicts=num_conflicts)


def piece_content(piece: Piece) -> dict[str, object]:
    """A piece as a file holds it; ``read_piece`` is the inverse."""
    return {
        "name": piece.name,
        "global_shape": list(piece.global_shape),
        "tensor": piece.tensor,
        "indices": list(piece.indices),
        "owned": piece.owned,
    }


def read_piece(content: object, where: str) -> Piece:
    """A piece out of a file; raises ``TraceError`` for anything else."""
    try:
        fields: dict[str, Any] = dict(content)  # type: ignore[call-overload]  # checked by what follows
        indices = tuple(fields["indices"])
        piece = Piece(
            name=str(fields["name"]),
            global_shape=tuple(fields["global_shape"]),
            tensor=fields["tensor"],
            indices=indices,
            owned=fields["owned"],
        )
        held = [size if at is None else len(at) for at, size in zip(indices, piece.global_shape, strict=True)]
        is_whole = list(piece.tensor.shape) == held and all(
            at is None or not len(at) or 0 <= int(at.min()) <= int(at.max()) < size
            for at, size in zip(indices, piece.global_shape, strict=True)
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TraceError(f"{where} holds no part of a parameter: {error}") from error
    if not is_whole:
        raise TraceError(
            f"{where}, {piece.name}: is {list(piece.tensor.shape)}; its indices say {held} of "
            f"{list(piece.global_shape)}"
        )
    return piece
