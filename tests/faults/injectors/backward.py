"""Faults of backward passes whose forward pass has every bit, and of sums that are made twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_layer import TransformerLayer

from pipelines.megatron.layers import attention
from tests.faults.counting import Fired
from tests.faults.injectors.gradients import _finalize
from tests.faults.injectors.one_rank import Heads, attending
from tests.faults.injectors.patching import on_layer, pp_size, replacing, tp_size, wrap_forward


class _HalfSilu(torch.autograd.Function):
    """Silu whose gradient is the sigmoid alone, without x s (1 - s)."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate)
        return F.silu(gate)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (gate,) = ctx.saved_tensors
        return gradient * torch.sigmoid(gate)


def _differentiate_half(fired: Fired, layer: TransformerLayer) -> None:
    config = layer.mlp.config

    def compute(forward: Callable[..., Any], *arguments: object, **options: object) -> object:
        fired.count += int(torch.is_grad_enabled())
        silu = config.activation_func
        config.activation_func = _HalfSilu.apply if tp_size() > 1 else silu
        try:
            return forward(*arguments, **options)
        finally:
            config.activation_func = silu

    wrap_forward(layer.mlp, compute)


silu_gradient_halved = on_layer(1, _differentiate_half)


class _OtherInput(torch.autograd.Function):
    """A product whose weight gradient is that of another input."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, other)
        return torch.matmul(hidden, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        weight, other = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ other.flatten(0, 1), None


def _keep_input(fired: Fired, layer: TransformerLayer) -> None:
    linear = layer.self_attention.linear_proj
    held: list[torch.Tensor] = []

    def multiply(forward: Callable[..., Any], hidden: torch.Tensor) -> object:
        if pp_size() == 1 or not (torch.is_grad_enabled() and linear.weight.requires_grad):
            return forward(hidden)
        other = held.pop() if held else hidden.detach()
        held.append(hidden.detach())
        fired.count += 1
        return _OtherInput.apply(hidden, linear.weight, other), None  # type: ignore[no-untyped-call]

    wrap_forward(linear, multiply)


input_of_batch_before = on_layer(1, _keep_input)


class _WithoutFirstHalf(torch.autograd.Function):
    """Passes a tensor on; the first half of its gradient is lost."""

    @staticmethod
    def forward(ctx: Any, gathered: torch.Tensor) -> torch.Tensor:
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        lost = gradient.clone()
        lost[: len(lost) // 2] = 0.0
        return lost


def _forget_keys(heads: Heads) -> Heads:
    query, key, value = heads
    return query, _WithoutFirstHalf.apply(key), value  # type: ignore[no-untyped-call]


keys_forgotten = attending(0, _forget_keys)


def _forget_queries(fired: Fired, gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forgetting(*arguments: object, **options: Any) -> torch.Tensor:
        gathered = gather(*arguments, **options)
        if options["group"].rank() != 1 or not torch.is_grad_enabled():
            return gathered
        fired.count += 1
        return _WithoutFirstHalf.apply(gathered)  # type: ignore[no-untyped-call]

    return forgetting


queries_forgotten = replacing(attention, "gather_from_sequence_parallel_region", _forget_queries)


def _sum_final_norm_again(fired: Fired, reduce: Callable[..., None]) -> Callable[..., None]:
    def again(model: Sequence[Any], config: object, tp_group: Any) -> None:
        reduce(model, config, tp_group)
        fired.count += 1
        for name, parameter in (pair for chunk in model for pair in chunk.named_parameters()):
            if name.endswith("final_layernorm.weight") and tp_group.size() > 1:
                torch.distributed.all_reduce(parameter.main_grad, group=tp_group)

    return again


def _sum_tied_again(fired: Fired, reduce: Callable[..., None]) -> Callable[..., None]:
    def again(*arguments: object) -> None:
        reduce(*arguments)
        fired.count += 1
        if pp_size() > 1:
            reduce(*arguments)

    return again


final_norm_summed_twice = replacing(_finalize, "_allreduce_non_tensor_model_parallel_grads", _sum_final_norm_again)
tied_summed_twice = replacing(_finalize, "_allreduce_word_embedding_grads", _sum_tied_again)
