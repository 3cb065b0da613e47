"""Cuts tensors into the parts of virtual ranks, puts them together, and adds in the order of the ranks.

Contract: a part is memory of its own whose dimensions lie as the whole's do, since kernels add in an order that may
depend on strides. Cutting and joining move bits and change none, forward and backward: where autograd would add padded
slices, these place them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

#: What autograd hands to a function's forward and backward pass; torch gives it no attribute that either sets.
Context = Any

Blocks = int | Literal["zigzag"]
"""The way to cut a dimension: it is so many blocks one after another, and a part is its part of each in turn;
``zigzag``: it is twice as many pieces as parts, and a part is the pieces equally far from both ends."""


def ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns ((p_0 + p_1) + p_2) + ..., each addition rounded in the parts' dtype."""
    # A copy, since callers scale the sum in place.
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def cut(whole: torch.Tensor, dim: int, num_parts: int, blocks: Blocks = 1) -> list[torch.Tensor]:
    """Returns the parts of a dimension, each with memory of its own."""
    if num_parts == 1:
        return [whole]
    if blocks == "zigzag":
        pieces = whole.chunk(2 * num_parts, dim=dim)
        return [_placed((pieces[part], pieces[-1 - part]), dim) for part in range(num_parts)]
    pieces = whole.chunk(blocks * num_parts, dim=dim)
    if blocks == 1:
        # A copy, since kernels may choose another order of sums for a view with strides.
        return [piece.clone() for piece in pieces]
    return [_placed(pieces[part::num_parts], dim) for part in range(num_parts)]


def joined(parts: Sequence[torch.Tensor], dim: int, blocks: Blocks = 1) -> torch.Tensor:
    """Puts the parts of ``cut`` together again."""
    if len(parts) == 1:
        return parts[0]
    if blocks == "zigzag":
        first, last = zip(*(part.chunk(2, dim=dim) for part in parts), strict=True)
        return _placed([*first, *last[::-1]], dim)
    if blocks == 1:
        return _placed(parts, dim)
    by_part = [part.chunk(blocks, dim=dim) for part in parts]
    return _placed([pieces[block] for block in range(blocks) for pieces in by_part], dim)


def _placed(pieces: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Returns the pieces one after another along ``dim``, with dimensions in the memory order of the first piece."""
    first = pieces[0]
    dim %= first.ndim
    order = sorted(range(first.ndim), key=first.stride, reverse=True)
    if order == list(range(first.ndim)):
        # No view, since Megatron's cross-entropy overwrites its logits.
        return torch.cat(list(pieces), dim=dim)
    placed = torch.cat([piece.permute(order) for piece in pieces], dim=order.index(dim))
    return placed.permute([order.index(index) for index in range(first.ndim)])


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, whole: torch.Tensor, dim: int, num_parts: int, blocks: Blocks
    ) -> tuple[torch.Tensor, ...]:
        ctx.place = (dim, blocks)
        return tuple(cut(whole, dim, num_parts, blocks))

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return joined(grads, *ctx.place), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, dim: int, blocks: Blocks, *parts: torch.Tensor) -> torch.Tensor:
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
        # The reduce-scatter of ``_GatherFromSequenceParallelRegion.backward``, taken rank by rank.
        return ordered_sum([grad.contiguous() for grad in grads]), None


class _SpreadBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, tokens: Tokens, length: int, num_lines: int, *biases: torch.Tensor) -> torch.Tensor:
        ctx.tokens, ctx.num_parts = tokens, len(biases)
        # Equal on all ranks, wherever their tokens lie.
        return biases[0].expand(length, num_lines, -1).contiguous()

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = ctx.tokens.cut(grad, ctx.num_parts)
        # The form in which autograd reduces the gradient of a broadcast bias.
        return (None, None, None, *(part.sum_to_size(part.shape[-1]) for part in parts))


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


def cut_graph(whole: torch.Tensor, dim: int, num_parts: int, blocks: Blocks = 1) -> list[torch.Tensor]:
    """``cut`` with a graph; the gradient is put together from the parts'."""
    return [whole] if num_parts == 1 else list(_Cut.apply(whole, dim, num_parts, blocks))


def join_graph(parts: Sequence[torch.Tensor], dim: int, blocks: Blocks = 1) -> torch.Tensor:
    """``joined`` with a graph; each part gets its part of the gradient, in memory of its own."""
    return parts[0] if len(parts) == 1 else _Join.apply(dim, blocks, *parts)


def sum_graph(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns ``ordered_sum`` with a graph: an all-reduce forward, and nothing backward."""
    return parts[0] if len(parts) == 1 else _OrderedSum.apply(*parts)


def copies_graph(whole: torch.Tensor, num_copies: int) -> list[torch.Tensor]:
    """One copy for each of so many ranks, whose gradients are added in their order: an all-gather's opposite."""
    return [whole] if num_copies == 1 else list(_Copies.apply(whole, num_copies))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """How the tokens of a line, dimension 0 where no other is named, are dealt to ranks.

    shares: their parts apart from sequence parallelism, of ranks that follow one another. blocks: how these are cut;
    each of them is cut into equal parts of tp ranks.
    """

    shares: int
    blocks: Blocks = 1

    def cut(self, whole: torch.Tensor, num_parts: int | None = None, *, dim: int = 0) -> list[torch.Tensor]:
        """Cuts into so many parts, share by share; into shares where no number is given. Builds a graph."""
        num_parts = num_parts or self.shares
        if self.blocks == 1:
            return cut_graph(whole, dim, num_parts)
        # cp first and tp within it: Megatron cuts a line over cp in its data, and over tp in the model.
        within = num_parts // self.shares
        return [
            part for share in cut_graph(whole, dim, self.shares, self.blocks) for part in cut_graph(share, dim, within)
        ]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Puts the parts of ``cut`` together again."""
        if self.blocks == 1:
            return join_graph(parts, 0)
        within = len(parts) // self.shares
        shares = [join_graph(parts[start : start + within], 0) for start in range(0, len(parts), within)]
        return join_graph(shares, 0, self.blocks)


def spread_bias(biases: Sequence[torch.Tensor], tokens: Tokens, length: int, num_lines: int) -> torch.Tensor:
    """Spreads a bias to ``[length, num_lines, h]``, where each of the biases has its rank's part of the length.

    The gradient of each is the sum over its own part.
    """
    return _SpreadBias.apply(tokens, length, num_lines, *biases)
