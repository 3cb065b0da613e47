"""Norms of virtual ranks' tokens, and the order in which a hidden state's gradients meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from pipelines.megatron.emulation.parts import cut_graph, join_graph

Norm = torch.nn.RMSNorm | torch.nn.LayerNorm
NormFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def norm_function(norm: Norm) -> NormFunction:
    """torch's function of a module's norm: of inputs, weight and bias."""
    if isinstance(norm, torch.nn.RMSNorm):
        return lambda inputs, weight, bias: F.rms_norm(inputs, norm.normalized_shape, weight, norm.eps)
    return lambda inputs, weight, bias: F.layer_norm(inputs, norm.normalized_shape, weight, bias, norm.eps)


def norm_of_parts(
    norm: Norm,
    hidden: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """The norm of ``hidden``, whose first dimension is cut into as many parts as there are weights."""
    if len(weights) == 1:
        return norm_function(norm)(hidden, weights[0], biases[0])
    if isinstance(norm, torch.nn.RMSNorm) and reads_twice(hidden):
        squared, scaled = (cut_graph(hidden, 0, len(weights)) for _ in range(2))
        assert norm.eps is not None  # Megatron gives one
        parts = [_rms_norm(*three, norm.eps) for three in zip(squared, scaled, weights, strict=True)]
    else:
        function, cut = norm_function(norm), cut_graph(hidden, 0, len(weights))
        parts = [function(*three) for three in zip(cut, weights, biases, strict=True)]
    return join_graph(parts, 0)


def reads_twice(hidden: torch.Tensor) -> bool:
    """Whether torch's RMS norm is operations of which two read their input, rather than one kernel or one of a cast.

    Then the gradient of a hidden state has three terms, of the residual and of these two, added in this order; cut
    once, the latter two would be added first (torch 2.13.0 on the CPU).
    """
    probe = torch.ones(1, 1, dtype=hidden.dtype, device=hidden.device, requires_grad=True)
    with torch.enable_grad():
        last = F.rms_norm(probe, (1,)).grad_fn
    assert last is not None
    return (
        "Mul" in last.name()
        and len([one for one, _ in last.next_functions if one is not None and "AccumulateGrad" in one.name()]) == 1
    )


def _rms_norm(squared: torch.Tensor, scaled: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · w, operation by operation as torch composes it; x is given once for each reading."""
    inverse = torch.rsqrt(torch.pow(squared, 2).mean(dim=-1, keepdim=True).add_(eps))
    return scaled.mul(inverse).mul(weight)
