"""Matrix products of virtual ranks: each rank's own product, and sums over ranks in their order.

What is multiplied with what, and in which form, is Megatron's (``LinearWithGradAccumulationAndAsyncCommunication``,
``tensor_parallel/layers.py``, megatron-core 0.16.1): y = x Wᵀ + b; dx = dy W; dW = dyᵀ x and db = Σ dy over lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipelines.megatron.emulation.parts import Context, ordered_sum


def _weight_gradient(grad: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dW ``[out, in]``, and dy as ``[tokens, out]``."""
    rows = grad.contiguous().view(-1, grad.shape[-1])
    return rows.t().matmul(inputs.contiguous().view(-1, inputs.shape[-1])), rows


class _ColumnProduct(torch.autograd.Function):
    """y_i = x W_iᵀ + b_i of every rank i; dx = Σ_i dy_i W_i."""

    @staticmethod
    def forward(
        ctx: Context, num_parts: int, inputs: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[:num_parts], parameters[num_parts:]
        ctx.has_bias = bool(biases)
        ctx.save_for_backward(inputs, *weights)
        outputs = [torch.matmul(inputs, weight.t()) for weight in weights]
        if biases:
            outputs = [output + bias for output, bias in zip(outputs, biases, strict=True)]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, *weights = ctx.saved_tensors
        of_inputs = ordered_sum([grad.matmul(weight) for grad, weight in zip(grads, weights, strict=True)])
        of_weights, rows = zip(*(_weight_gradient(grad, inputs) for grad in grads), strict=True)
        of_biases = [part.sum(dim=0) for part in rows] if ctx.has_bias else []
        return (None, of_inputs, *of_weights, *of_biases)


class _RowProduct(torch.autograd.Function):
    """y = Σ_i x_i W_iᵀ."""

    @staticmethod
    def forward(ctx: Context, num_parts: int, *tensors: torch.Tensor) -> torch.Tensor:
        inputs, weights = tensors[:num_parts], tensors[num_parts:]
        ctx.num_parts = num_parts
        ctx.save_for_backward(*tensors)
        return ordered_sum([torch.matmul(one, weight.t()) for one, weight in zip(inputs, weights, strict=True)])

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weights = ctx.saved_tensors[: ctx.num_parts], ctx.saved_tensors[ctx.num_parts :]
        of_inputs = [grad.matmul(weight) for weight in weights]
        return (None, *of_inputs, *(_weight_gradient(grad, one)[0] for one in inputs))


def column_product(
    inputs: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What each rank's part of the output features is; inputs: ``[s, b, in]``, of which every rank has all."""
    return list(_ColumnProduct.apply(len(weights), inputs, *weights, *biases))


def row_product(inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The ranks' products ``[s, b, out]``, added in their order; inputs: each rank's part of the features."""
    return _RowProduct.apply(len(weights), *inputs, *weights)
