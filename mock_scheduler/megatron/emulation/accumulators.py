"""Holds parameters as virtual ranks do, with a main gradient for each rank's part.

A part is cut anew from the parameter in every pass, so nothing can be out of date. Its gradient of one backward pass is
added to an accumulator, as ``DistributedDataParallel`` adds a parameter's to its ``main_grad``; the parameter itself
gets none. ``gradients`` then sums over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from mock_scheduler.megatron.emulation.parts import Context, cut

Sharing = Literal["split", "whole", "by_sequence", "by_heads"]
"""How tp ranks share a parameter: a part each; the whole with the same gradient; the whole, each with the gradient of
its part of the sequence, or of its heads, which are summed over tp."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSplit:
    """Holds the way virtual ranks hold a parameter.

    dim, blocks: the cut dimension and its number of blocks, as ``cut`` has it; ``None``: nothing is cut. num_parts: tp
    ranks with something of their own to accumulate. num_replicas: how many have all of it in a pass: cp ranks, of each
    of the replicas that compute together; of an expert, its holders. is_expert: whether its gradients are summed over
    its holders alone, in buffers of their own.
    """

    sharing: Sharing
    num_parts: int = 1
    num_replicas: int = 1
    dim: int | None = None
    blocks: int = 1
    is_expert: bool = False

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Cuts a tensor of the parameter's shape into the tp ranks' parts."""
        if self.dim is None:
            return [whole] * self.num_parts
        return cut(whole, self.dim, self.num_parts, self.blocks)


@dataclass(eq=False, slots=True)
class Accumulator:
    """Holds the gradients of one use of a parameter, by replica and tp rank. ``dtype``: of main gradients.

    Replicas are numbered over all passes of an update that compute different micro-batches at one time.
    """

    split: ParameterSplit
    dtype: torch.dtype
    sums: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def add(self, place: tuple[int, int], grad: torch.Tensor) -> None:
        """Adds one backward pass's gradient of a rank's part, rounded to the accumulator's dtype."""
        if place not in self.sums:
            # Zeros, as ``main_grad`` starts: a first gradient of -0.0 becomes 0.0 there too.
            self.sums[place] = torch.zeros(grad.shape, dtype=self.dtype, device=grad.device)
        # One addition for each backward pass, in the order of micro-batches: ``_make_backward_post_hook`` of Megatron's
        # DDP.
        self.sums[place].add_(grad)


class Accumulators:
    """The accumulators of one model. ``round``: the lot of virtual replicas that computes now.

    uses: a parameter's; one, but for tied embeddings on two pipeline stages, each with a gradient of its own.
    """

    def __init__(self) -> None:
        self.round = 0
        self._by_use: dict[tuple[torch.nn.Parameter, str], Accumulator] = {}

    def register(self, parameter: torch.nn.Parameter, split: ParameterSplit, *, use: str = "") -> None:
        """Say how a parameter is held, once."""
        # Main gradients are float32 under ``grad_reduce_in_fp32``, whatever the parameter is.
        main = parameter.main_grad.dtype if hasattr(parameter, "main_grad") else parameter.dtype
        self._by_use[parameter, use] = Accumulator(split=split, dtype=main)

    def of(self, parameter: torch.nn.Parameter) -> Iterator[Accumulator]:
        """Yields the accumulators of a parameter's uses, in the order of their registration."""
        return (accumulator for (known, _), accumulator in self._by_use.items() if known is parameter)

    def clear(self) -> None:
        """Forget all gradients, before an update."""
        for accumulator in self._by_use.values():
            accumulator.sums.clear()

    def take(self, parameter: torch.nn.Parameter, *, use: str = "") -> list[list[torch.Tensor]]:
        """Returns the parameter's parts by replica and then by tp rank; gradients go to the accumulators."""
        accumulator = self._by_use[parameter, use]
        if not parameter.requires_grad:
            # A frozen parameter has one copy for all replicas, since no gradient has to be kept apart.
            return [accumulator.split.parts(parameter.detach())] * accumulator.split.num_replicas
        parts = _Take.apply(parameter, accumulator, self)
        if not torch.is_grad_enabled():
            # Kernels may ask whether a weight could have a gradient, as torch's RMS norm does; a parameter says yes.
            parts = [part.requires_grad_() for part in parts]
        size = accumulator.split.num_parts
        return [list(parts[start : start + size]) for start in range(0, len(parts), size)]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, parameter: torch.Tensor, accumulator: Accumulator, owner: Accumulators
    ) -> tuple[torch.Tensor, ...]:
        # The replica of this forward pass, whenever its backward pass comes.
        ctx.accumulator, ctx.round = accumulator, owner.round
        # A part that no loss reached has no gradient; one of zeros would make an accumulator.
        ctx.set_materialize_grads(False)
        split = accumulator.split
        copies = [split.parts(parameter) for _ in range(split.num_replicas)]
        return tuple(part.clone() if part is parameter else part for parts in copies for part in parts)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        split, size = ctx.accumulator.split, ctx.accumulator.split.num_parts
        # Replicas of this round are numbered behind those of the rounds before.
        first = ctx.round * split.num_replicas
        for index, grad in enumerate(grads):
            if grad is not None:
                ctx.accumulator.add((first + index // size, index % size), grad)
        return None, None, None
