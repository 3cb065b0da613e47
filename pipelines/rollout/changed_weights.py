"""Has a policy compute with changed weights for a while: rounded ones, or another output head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from mock_scheduler.megatron.observed_model import unwrapped


@contextmanager
def rounded_weights(chunks: Sequence[torch.nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Rounds every floating parameter to ``dtype`` in the block, and restores its bits after it.

    Rounding is to nearest, ties to even; float64 is rounded to float32 first, as on its way into an engine's
    checkpoint. A value beyond ``dtype`` becomes infinite. However the block is left, the bits come back into the same
    storage, so its other users (gradient buffers, an optimizer's main parameters) see them as before. Costs a copy of
    the parameters. It does not communicate; all parameters must have been gathered.
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
        # The other way round, so parameters with shared storage end with the bits of the first of them.
        while originals:
            _assign(*originals.pop())


@contextmanager
def other_head(chunks: Sequence[torch.nn.Module], head: torch.Tensor | None) -> Iterator[None]:
    """Computes logits with another output head in the block. ``head``: this rank's part; ``None`` off the last stage.

    A tied embedding stays as it is where tokens are read.
    """
    if head is None:
        yield
        return
    layer = unwrapped(chunks[-1]).output_layer

    def replaced(
        _layer: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return args, {**kwargs, "weight": weight}

    own = next(chunks[-1].parameters())
    weight = head.to(device=own.device, dtype=own.dtype)
    handle = layer.register_forward_pre_hook(replaced, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def _assign(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    parameter.copy_(values)


def _round(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    narrow = values.float() if values.dtype is torch.float64 else values
    return narrow.to(dtype).to(values.dtype)
