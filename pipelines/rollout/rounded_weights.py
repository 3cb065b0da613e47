"""Weights as an inference engine of a narrower type holds them, for as long as it samples.

Only the values of parameters are rounded: they stay in their own type and storage, and the computation in its own
precision. Buffers are left alone, as is an expert bias, which engines hold in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def rounded_weights(chunks: Sequence[torch.nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """In the block, the value of every floating parameter is the nearest one of ``dtype``; after it, what it was.

    Rounding is to nearest, ties to even; float64 is rounded to float32 first, as on its way into an engine's
    checkpoint. What ``dtype`` cannot hold becomes infinite. The bits that a parameter had come back however the block
    is left, into the same storage, so whatever else refers to this (gradient buffers, an optimizer's main parameters)
    sees them as before. Costs a copy of the parameters. It does not communicate; parameters that are still to be
    gathered must have been.
    """
    parameters = dict.fromkeys(parameter for chunk in chunks for parameter in chunk.parameters())
    originals: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    try:
        for parameter in parameters:
            if parameter.is_floating_point():
                originals.append((parameter, parameter.detach().clone()))
                _assign(parameter, _round(parameter.detach(), dtype))
        yield
    finally:
        # The other way round, so that parameters which share storage end with what the first of them had.
        while originals:
            _assign(*originals.pop())


@torch.no_grad()
def _assign(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    parameter.copy_(values)


def _round(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    narrow = values.float() if values.dtype is torch.float64 else values
    return narrow.to(dtype).to(values.dtype)
