"""What a module of a bfloat16 model computes, and the same from another kernel."""

from __future__ import annotations

import torch


def rounded_otherwise(values: torch.Tensor) -> torch.Tensor:
    """The same values from another kernel: a third of the elements are the next number."""
    moved = torch.rand(values.shape, generator=torch.Generator().manual_seed(4)) < 1 / 3
    up = torch.rand(values.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    steps = torch.where(moved, torch.where(up, 1, -1), 0).to(torch.int16)
    return (values.view(torch.int16) + steps).view(torch.bfloat16)
