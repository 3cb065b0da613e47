"""Multiplies and normalises as virtual ranks do: each rank's own product or norm, and sums over ranks in their order.

Products have Megatron's operands and forms (``LinearWithGradAccumulationAndAsyncCommunication``,
``tensor_parallel/layers.py``, megatron-core 0.16.1): y = x Wᵀ + b; dx = dy W; dW = dyᵀ x and db = Σ dy over lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from mock_scheduler.megatron.emulation.parts import Context, Tokens, ordered_sum


def _weight_gradient(grad: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns dW ``[out, in]``, and dy as ``[tokens, out]``."""
    # dyᵀ x in this form: the transposed product may add in another order.
    rows = grad.contiguous().view(-1, grad.shape[-1])
    return rows.t().matmul(inputs.contiguous().view(-1, inputs.shape[-1])), rows


class _ColumnProduct(torch.autograd.Function):
    """Computes y_i = x W_iᵀ + b_i of every rank i; dx = Σ_i dy_i W_i."""

    @staticmethod
    def forward(
        ctx: Context, num_parts: int, inputs: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[:num_parts], parameters[num_parts:]
        ctx.has_bias = bool(biases)
        ctx.save_for_backward(inputs, *weights)
        outputs = [torch.matmul(inputs, weight.t()) for weight in weights]
        if biases:
            # A product and then an addition, as in Megatron's: a fused ``addmm`` could round once where these round
            # twice.
            outputs = [output + bias for output, bias in zip(outputs, biases, strict=True)]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, *weights = ctx.saved_tensors
        # In a layout this sum is an all-reduce or reduce-scatter over tp.
        of_inputs = ordered_sum([grad.matmul(weight) for grad, weight in zip(grads, weights, strict=True)])
        of_weights, rows = zip(*(_weight_gradient(grad, inputs) for grad in grads), strict=True)
        of_biases = [part.sum(dim=0) for part in rows] if ctx.has_bias else []
        return (None, of_inputs, *of_weights, *of_biases)


class _RowProduct(torch.autograd.Function):
    """Computes y = Σ_i x_i W_iᵀ."""

    @staticmethod
    def forward(ctx: Context, num_parts: int, *tensors: torch.Tensor) -> torch.Tensor:
        inputs, weights = tensors[:num_parts], tensors[num_parts:]
        ctx.num_parts = num_parts
        ctx.save_for_backward(*tensors)
        # In a layout this sum is an all-reduce or reduce-scatter over tp, and its backward pass adds nothing.
        return ordered_sum([torch.matmul(one, weight.t()) for one, weight in zip(inputs, weights, strict=True)])

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weights = ctx.saved_tensors[: ctx.num_parts], ctx.saved_tensors[ctx.num_parts :]
        # All ranks get the sum's gradient as it is (``_ReduceFromModelParallelRegion.backward``).
        of_inputs = [grad.matmul(weight) for weight in weights]
        return (None, *of_inputs, *(_weight_gradient(grad, one)[0] for one in inputs))


def column_product(
    inputs: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Computes each rank's part of the output features; inputs: ``[s, b, in]``, whole on every rank."""
    return list(_ColumnProduct.apply(len(weights), inputs, *weights, *biases))


def row_product(inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the ranks' products ``[s, b, out]``, added in their order; inputs: each rank's part of the features."""
    return _RowProduct.apply(len(weights), *inputs, *weights)


Norm = torch.nn.RMSNorm | torch.nn.LayerNorm
NormFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def norm_function(norm: Norm) -> NormFunction:
    """Returns torch's function of a module's norm: of inputs, weight and bias."""
    if isinstance(norm, torch.nn.RMSNorm):
        return lambda inputs, weight, bias: F.rms_norm(inputs, norm.normalized_shape, weight, norm.eps)
    return lambda inputs, weight, bias: F.layer_norm(inputs, norm.normalized_shape, weight, bias, norm.eps)


def norm_of_parts(
    norm: Norm,
    hidden: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    tokens: Tokens,
) -> torch.Tensor:
    """The norm of ``hidden``, whose tokens are cut into as many parts as there are weights."""
    if len(weights) == 1:
        return norm_function(norm)(hidden, weights[0], biases[0])
    if isinstance(norm, torch.nn.RMSNorm) and reads_twice(hidden):
        # Cut once for each reading, so that their gradients reach the hidden state one after the other.
        squared, scaled = (tokens.cut(hidden, len(weights)) for _ in range(2))
        assert norm.eps is not None  # Megatron gives one
        parts = [_rms_norm(*three, norm.eps) for three in zip(squared, scaled, weights, strict=True)]
    else:
        function, cut = norm_function(norm), tokens.cut(hidden, len(weights))
        parts = [function(*three) for three in zip(cut, weights, biases, strict=True)]
    return tokens.join(parts)


def reads_twice(hidden: torch.Tensor) -> bool:
    """Says whether torch's RMS norm is operations, two of which read their input, rather than one kernel or one of a
    cast.

    Then the gradient of a hidden state has three terms, of the residual and of these two, added in this order; cut
    once, the latter two would be added first (torch 2.13.0 on the CPU).
    """
    probe = torch.ones(1, 1, dtype=hidden.dtype, device=hidden.device, requires_grad=True)
    with torch.enable_grad():
        last = F.rms_norm(probe, (1,)).grad_fn
    assert last is not None
    # Composed, the last operation multiplies the input itself; a kernel has a node of its own, a cast stands between.
    return (
        "Mul" in last.name()
        and len([one for one, _ in last.next_functions if one is not None and "AccumulateGrad" in one.name()]) == 1
    )


def _rms_norm(squared: torch.Tensor, scaled: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · w, operation by operation as torch composes it; x is given once for each reading."""
    inverse = torch.rsqrt(torch.pow(squared, 2).mean(dim=-1, keepdim=True).add_(eps))
    return scaled.mul(inverse).mul(weight)
