"""Layers for a machine without TransformerEngine: Megatron's local ones, with what these lack.

Megatron's own norm refuses sequence parallelism, and its attention context parallelism, packed rows and latent heads.
Where none of these is asked for, both compute what Megatron's own do, to the last bit.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def build_layer_specs(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:  # noqa: ANN401
    """Builds the specs of a stage's layers, as ``transformer_layer_spec`` of a ``GPTModelConfig``."""
    transformer = config.transformer
    block = get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=False, normalization=transformer.normalization, vp_stage=vp_stage
    )
    specs = []
    for spec in block.layer_specs:
        attention = spec.submodules.self_attention
        submodules = replace(
            spec.submodules,
            input_layernorm=Norm,
            pre_mlp_layernorm=Norm,
            self_attention=replace(attention, submodules=replace(attention.submodules, core_attention=Attention)),
        )
        specs.append(replace(spec, submodules=submodules))
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


class Norm:
    """Builds torch's norm; Megatron sums the gradients of marked parameters over tp."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> torch.nn.Module:
        """A norm over ``hidden_size``, of the kind that ``config.normalization`` names; the rest is Megatron's."""
        norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class Attention(DotProductAttention):
    """Megatron's attention over packed rows with a mask, or over the keys of all cp ranks."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: object,
        k_channels: int | None = None,  # latent attention's, whose tensors have them too
        v_channels: int | None = None,
        **kwargs: object,
    ) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # Megatron's class refuses more
        super().__init__(alone, *args, **kwargs)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Attends over ``[s, b, heads, d]``, or packed ``[t, heads, d]``; returns ``[s, b, h]``."""
        if packed_seq_params is not None:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
            attention_mask = _hide_other_rows(packed_seq_params.cu_seqlens_q)
        elif parallel_state.get_context_parallel_world_size() > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (key, value))
            attention_mask = _hide_later_tokens(key.shape[0])
        return super().forward(query, key, value, attention_mask, **kwargs)


def _hide_other_rows(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Bool ``[1, 1, t, t]``: True where the key is of another row than the query, or behind it."""
    rows = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())
    later = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
    return ((rows[:, None] != rows[None, :]) | later)[None, None]


def _hide_later_tokens(length: int) -> torch.Tensor:
    """Bool ``[1, 1, s / cp, s]``: True where the key is behind the query; rank r has pieces r and 2·cp - 1 - r."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    pieces = torch.arange(length).chunk(2 * size)
    places = [torch.cat((pieces[each], pieces[2 * size - 1 - each])) for each in range(size)]
    return (torch.cat(places)[None, :] > places[rank][:, None])[None, None]
