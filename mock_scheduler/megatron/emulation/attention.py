"""Self-attention of virtual ranks: each one's heads, over its tokens and the keys of all its replica's cp ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp

from mock_scheduler.megatron.emulation.modules import EmulatedModules
from mock_scheduler.megatron.emulation.parts import copies_graph, cut_graph, join_graph

_Parts = list[torch.Tensor]


def emulate_attention(attention: SelfAttention, modules: EmulatedModules) -> None:
    """Let a layer's attention compute rank by rank."""
    modules.column_linear(attention.linear_qkv)
    modules.row_linear(attention.linear_proj)
    for norm in (attention.q_layernorm, attention.k_layernorm):
        if norm is not None and not isinstance(norm, IdentityOp):
            modules.norm_of_heads(norm)
    core = attention.core_attention
    modules.emulate(core)

    def forward(
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        mixed, _ = attention.linear_qkv(hidden)
        queries, keys, values = _split_heads(attention, modules, mixed)
        if packed_seq_params is not None:
            # Packed rows lie in one line, whose dimension Megatron takes away before attention.
            queries, keys, values = ([part.squeeze(1) for part in parts] for parts in (queries, keys, values))
        if rotary_pos_emb is not None:
            angles = _angles_by_rank(rotary_pos_emb, mixed.shape[0], modules, is_packed=packed_seq_params is not None)
            of_queries, of_keys = _row_bounds(packed_seq_params)
            queries = [_turn(part, own, attention, of_queries) for part, own in zip(queries, angles, strict=True)]
            keys = [_turn(part, own, attention, of_keys) for part, own in zip(keys, angles, strict=True)]
        packed = {} if packed_seq_params is None else {"packed_seq_params": packed_seq_params}
        return attention.linear_proj(core(queries, keys, values, attention_mask, **packed))

    modules.replace(attention, forward)


def _split_heads(
    attention: SelfAttention, modules: EmulatedModules, mixed: torch.Tensor
) -> tuple[_Parts, _Parts, _Parts]:
    """Queries, keys and values of every rank, share by share, of ``[s, b, groups · (heads per group + 2) · head]``."""
    size, plan = attention.hidden_size_per_attention_head, modules.plan
    groups = attention.num_query_groups_per_partition // plan.tp
    per_group = attention.num_attention_heads_per_partition // attention.num_query_groups_per_partition
    queries, keys, values = [], [], []
    for tokens in modules.tokens.cut(mixed):
        for part in cut_graph(tokens, -1, plan.tp):
            # Megatron's order: of each group its queries, then its key, then its value.
            heads = part.view(*part.shape[:-1], groups, (per_group + 2) * size)
            query, key, value = torch.split(heads, [per_group * size, size, size], dim=3)
            queries.append(query.reshape(*query.shape[:2], -1, size))
            keys.append(key)
            values.append(value)
    # Before the rotation, as in ``SelfAttention.get_query_key_value_tensors``.
    if attention.q_layernorm is not None and not isinstance(attention.q_layernorm, IdentityOp):
        queries = modules.cut_heads(attention.q_layernorm(queries))
    if attention.k_layernorm is not None and not isinstance(attention.k_layernorm, IdentityOp):
        keys = modules.cut_heads(attention.k_layernorm(keys))
    return queries, keys, values


def _row_bounds(packed: PackedSeqParams | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The bounds of packed rows of queries and of keys, padding included, as ``Attention.forward`` takes them."""
    if packed is None:
        return None, None
    padded = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
    return (
        packed.cu_seqlens_q if padded[0] is None else padded[0],
        packed.cu_seqlens_kv if padded[1] is None else padded[1],
    )


def _angles_by_rank(angles: torch.Tensor, length: int, modules: EmulatedModules, *, is_packed: bool) -> _Parts:
    if is_packed:  # each row takes those from the first on
        return [angles] * modules.plan.tp
    # Dealt as the tokens are (``get_pos_emb_on_this_cp_rank``): each keeps the angle of its place in the line.
    by_share = modules.tokens.cut(angles[:length])
    return [own for own in by_share for _ in range(modules.plan.tp)]


def _turn(
    tensor: torch.Tensor, angles: torch.Tensor, attention: SelfAttention, bounds: torch.Tensor | None
) -> torch.Tensor:
    return apply_rotary_pos_emb(
        tensor, angles, config=attention.config, cu_seqlens=bounds, cp_group=attention.pg_collection.cp
    )


def emulate_core(
    core: DotProductAttention, modules: EmulatedModules, *, attend: Callable[..., torch.Tensor] | None = None
) -> None:
    """Lets the core attention take lists of the ranks' tensors, and give the whole context ``[s, b, heads · head]``.

    attend: one rank's attention, called with a copy of the module that has the rank's heads; the module's own.
    """
    tp, cp = modules.plan.tp, modules.plan.cp
    of_rank = _with_heads(core, tp, attend or type(core).forward)

    def forward(
        query: _Parts, key: _Parts, value: _Parts, attention_mask: torch.Tensor | None, **packed: object
    ) -> torch.Tensor:
        all_keys, all_values = (_gathered_by_lane(parts, tp, cp) for parts in (key, value))
        masks = _masks_by_share(modules, attention_mask, length=sum(len(part) for part in query) // tp)
        contexts = [
            of_rank(query[rank], all_keys[rank], all_values[rank], masks[rank // tp], **packed)
            for rank in range(len(query))
        ]
        if packed:
            contexts = [context.reshape(context.shape[0], 1, -1) for context in contexts]
        return modules.join_heads(contexts)

    modules.replace(core, forward)


def _masks_by_share(
    modules: EmulatedModules, mask: torch.Tensor | None, *, length: int
) -> Sequence[torch.Tensor | None]:
    """Each share's lines of a mask ``[b, 1, queries, keys]``; the keys of a replica are gathered over its cp ranks."""
    tokens = modules.tokens
    if tokens.blocks == 1:
        # The mask that the model is given has gathered keys.
        return [None] * tokens.shares if mask is None else list(mask.chunk(tokens.shares, dim=2))
    if mask is None:
        device = torch.cuda.current_device()
        # True is hidden: every key behind the query, by their places in the line.
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
    # Columns in the order of the gathered keys, lines in that of each share's queries.
    return tokens.cut(torch.cat(tokens.cut(mask, dim=3), dim=3), dim=2)


def _with_heads(core: DotProductAttention, tp: int, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An attention over a tp-th of the heads, as one process computes it."""
    # A shallow copy: scale, softmax and dropout stay the layer's, and only the numbers of heads are a rank's.
    part = copy.copy(core)
    part.num_attention_heads_per_partition = core.num_attention_heads_per_partition // tp
    part.num_query_groups_per_partition = core.num_query_groups_per_partition // tp
    part.hidden_size_per_partition = core.hidden_size_per_partition // tp

    return partial(attend, part)


def _gathered_by_lane(parts: _Parts, tp: int, cp: int) -> _Parts:
    """Returns ``_gathered`` of each of the replicas that compute together."""
    size = tp * cp
    return [one for start in range(0, len(parts), size) for one in _gathered(parts[start : start + size], tp, cp)]


def _gathered(parts: _Parts, tp: int, cp: int) -> _Parts:
    """Keys or values of all cp ranks, for each rank, cp by cp; gradients come back added in the order of cp ranks."""
    if cp == 1:
        return parts
    whole = [join_graph([parts[rank * tp + part].contiguous() for rank in range(cp)], 0) for part in range(tp)]
    # The all-gather's backward pass is a reduce-scatter: each rank's gradient of all keys is added, in rank order.
    copies = [copies_graph(tensor, cp) for tensor in whole]
    return [copies[part][rank] for rank in range(cp) for part in range(tp)]
