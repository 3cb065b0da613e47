"""Faults of one rank, one head or one token alone, in the forward pass and in what a rank is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.transformer_layer import TransformerLayer

from pipelines.megatron import passes
from pipelines.megatron.layers.attention import RowRotaryEmbedding
from pipelines.megatron.places import OwnBatch
from tests.faults.counting import Fired
from tests.faults.fault import Injector
from tests.faults.injectors.patching import (
    dp_rank,
    on_layer,
    on_modules,
    on_outputs,
    replacing,
    tp_rank,
    tp_size,
    wrap_forward,
)

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _widen_epsilon(fired: Fired, layer: TransformerLayer) -> None:
    def normalise(forward: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        fired.count += int(tp_rank() == 1)
        return forward(hidden)

    norm = layer.self_attention.q_layernorm
    norm.eps = 1e-3 if tp_rank() == 1 else norm.eps
    wrap_forward(norm, normalise)


epsilon_of_one_rank = on_layer(0, _widen_epsilon)


def attending(number: int, change: Callable[[Heads], Heads]) -> Injector:
    """Query, key and value of one layer are others on the second tp rank."""

    def harm(fired: Fired, layer: TransformerLayer) -> None:
        def attend(forward: Callable[..., torch.Tensor], *tensors: torch.Tensor, **options: object) -> torch.Tensor:
            if tp_rank() != 1:
                return forward(*tensors, **options)
            fired.count += 1
            query, key, value, *rest = tensors
            return forward(*change((query, key, value)), *rest, **options)

        wrap_forward(layer.self_attention.core_attention, attend)

    return on_layer(number, harm)


def _exchange_in_second_group(heads: Heads) -> Heads:
    query, key, value = heads
    return query, torch.cat((key[:, :, :1], value[:, :, 1:]), 2), torch.cat((value[:, :, :1], key[:, :, 1:]), 2)


def _stretch_last_head(heads: Heads) -> Heads:
    query, key, value = heads
    factors = torch.ones(query.shape[2], 1, dtype=query.dtype)
    factors[-1] = 1.05
    return query * factors, key, value


key_value_exchanged = attending(0, _exchange_in_second_group)
head_stretched = attending(1, _stretch_last_head)


def _turn_backwards(fired: Fired, module: Any) -> None:
    def turn(forward: Callable[..., torch.Tensor], *arguments: object, **options: object) -> torch.Tensor:
        fired.count += int(tp_rank() == 1)
        angles = forward(*arguments, **options)
        half = angles.shape[-1] // 2
        return torch.cat((-angles[..., :half], angles[..., half:]), dim=-1) if tp_rank() == 1 else angles

    wrap_forward(module, turn)


rotary_half_reversed = on_modules(RowRotaryEmbedding, _turn_backwards)


def _stretch_token(fired: Fired, layer: TransformerLayer) -> None:
    def compute(forward: Callable[..., Any], *arguments: object, **options: object) -> object:
        output, bias = forward(*arguments, **options)
        if dp_rank() != 1:
            return output, bias
        fired.count += 1
        factors = torch.ones(*output.shape[:2], 1, dtype=output.dtype)
        factors[7, 0] = 1.01
        return output * factors, bias

    wrap_forward(layer.mlp, compute)


token_stretched = on_layer(0, _stretch_token)


def _steepen(fired: Fired, layer: TransformerLayer) -> None:
    config = layer.mlp.config

    def compute(forward: Callable[..., Any], *arguments: object, **options: object) -> object:
        if dp_rank() != 1:
            return forward(*arguments, **options)
        fired.count += 1
        silu, config.activation_func = config.activation_func, lambda gate: gate * torch.sigmoid(1.01 * gate)
        try:
            return forward(*arguments, **options)
        finally:
            config.activation_func = silu

    wrap_forward(layer.mlp, compute)


silu_steeper = on_layer(1, _steepen)


def _stretch_embedding(fired: Fired, output: torch.Tensor) -> torch.Tensor:
    fired.count += 1
    return output * (1.002 if tp_size() > 1 else 1.0)


embedding_stretched = on_outputs(VocabParallelEmbedding, _stretch_embedding)


def _begin_one_late(fired: Fired, module: Any) -> None:
    def look_up(forward: Callable[..., torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        if tp_rank() != 1:
            return forward(tokens)
        is_first = tokens == module.vocab_start_index
        fired.count += int(is_first.sum())
        return forward(tokens.masked_fill(is_first, 0))  # a token that the first rank holds

    wrap_forward(module, look_up)


first_token_masked = on_modules(VocabParallelEmbedding, _begin_one_late)


def _exchange_first_two(fired: Fired, iterate: Callable[..., object]) -> Callable[..., object]:
    def exchanged(batches: Sequence[OwnBatch], num_chunks: int) -> object:
        is_last = parallel_state.is_pipeline_last_stage() and not parallel_state.is_pipeline_first_stage()
        if not is_last or len(batches) < 2:
            return iterate(batches, num_chunks)
        fired.count += 1
        return iterate([batches[1], batches[0], *batches[2:]], num_chunks)

    return exchanged


micro_batches_exchanged = replacing(passes, "iterators", _exchange_first_two)
