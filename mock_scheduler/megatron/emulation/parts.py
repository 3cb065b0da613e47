"""Cuts tensors into the parts of virtual ranks, puts them together, and adds in the order of the ranks.

Contract: a part is memory of its own whose dimensions lie as the whole's do, since kernels add in an order that may
depend on strides. Cutting and joining move bits and change none, forward and backward: where autograd would add padded
slices, these place them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

#: What autograd hands to a function's forward and backward pass; torch gives it no attribute that either sets.
Context = Any


def ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """((p_0 + p_1) + p_2) + ..., each addition rounded in the parts' dtype."""
    # A copy, since callers scale the sum in place.
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def cut(whole: torch.Tensor, dim: int, num_parts: int, blocks: int = 1) -> list[torch.Tensor]:
    """The parts of a dimension, each with memory of its own.

    blocks: the dimension is so many blocks one after another, and a part is its part of each of them in turn.
    """
    if num_parts == 1:
        return [whole]
    pieces = whole.chunk(blocks * num_parts, dim=dim)
    if blocks == 1:
        # A copy, since kernels may choose another order of sums for a view with strides.
        return [piece.clone() for piece in pieces]
    return [_placed(pieces[part::num_parts], dim) for part in range(num_parts)]


def joined(parts: Sequence[torch.Tensor], dim: int, blocks: int = 1) -> torch.Tensor:
    """Puts the parts of ``cut`` together again."""
    if len(parts) == 1:
        return parts[0]
    if blocks == 1:
        return _placed(parts, dim)
    by_part = [part.chunk(blocks, dim=dim) for part in parts]
    return _placed([pieces[block] for block in range(blocks) for pieces in by_part], dim)


def _placed(pieces: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The pieces one after another along ``dim``, with dimensions in the memory order of the first piece."""
    first = pieces[0]
    dim %= first.ndim
    order = sorted(range(first.ndim), key=first.stride, reverse=True)
    placed = torch.cat([piece.permute(order) for piece in pieces], dim=order.index(dim))
    return placed.permute([order.index(index) for index in range(first.ndim)])


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, whole: torch.Tensor, dim: int, num_parts: int, blocks: int) -> tuple[torch.Tensor, ...]:
        ctx.place = (dim, blocks)
        return tuple(cut(whole, dim, num_parts, blocks))

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return joined(grads, *ctx.place), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, dim: int, blocks: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.place = (dim, len(parts), blocks)
        return joined(parts, dim, blocks)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *cut(grad, *ctx.place))


class _OrderedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, *parts: torch.Tensor) -> torch.Tensor:
        ctx.num_parts = len(parts)
        return ordered_sum(parts)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # The gradient of a sum is the same for each addend: ranks get it without communication.
        return (grad,) * ctx.num_parts


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, whole: torch.Tensor, num_copies: int) -> tuple[torch.Tensor, ...]:
        return tuple(whole.clone() for _ in range(num_copies))

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ordered_sum([grad.contiguous() for grad in grads]), None


class _SpreadBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, length: int, num_lines: int, *biases: torch.Tensor) -> torch.Tensor:
        ctx.num_parts = len(biases)
        rows = length // len(biases)
        return torch.cat([bias.expand(rows, num_lines, -1) for bias in biases])

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = cut(grad, 0, ctx.num_parts)
        # The form in which autograd reduces the gradient of a broadcast bias.
        return (None, None, *(part.sum_to_size(part.shape[-1]) for part in parts))


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.scale, None


def scale_gradient(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """The tensor itself, whose gradient is multiplied by a power of two."""
    return tensor if scale == 1.0 else _ScaleGradient.apply(tensor, scale)


def cut_graph(whole: torch.Tensor, dim: int, num_parts: int, blocks: int = 1) -> list[torch.Tensor]:
    """``cut`` with a graph; the gradient is put together from the parts'."""
    return [whole] if num_parts == 1 else list(_Cut.apply(whole, dim, num_parts, blocks))


def join_graph(parts: Sequence[torch.Tensor], dim: int, blocks: int = 1) -> torch.Tensor:
    """``joined`` with a graph; each part gets its part of the gradient, in memory of its own."""
    return parts[0] if len(parts) == 1 else _Join.apply(dim, blocks, *parts)


def sum_graph(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``ordered_sum`` with a graph: an all-reduce forward, and nothing backward."""
    return parts[0] if len(parts) == 1 else _OrderedSum.apply(*parts)


def copies_graph(whole: torch.Tensor, num_copies: int) -> list[torch.Tensor]:
    """One copy for each of so many ranks, whose gradients are added in their order: an all-gather's opposite."""
    return [whole] if num_copies == 1 else list(_Copies.apply(whole, num_copies))


def spread_bias(biases: Sequence[torch.Tensor], length: int, num_lines: int) -> torch.Tensor:
    """Spreads a bias to ``[length, num_lines, h]``, where each of the biases has an equal part of the length.

    The gradient of each is the sum over its own part.
    """
    return _SpreadBias.apply(length, num_lines, *biases)
