"""A planted fault: the optimizer's update is lost; every parameter keeps its value.

The first update's loss and gradients are equal to a healthy run's; only what the update did differs. Run as the
``entry`` of an alignment candidate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.faults.harness import Fired, run_with_fault

if TYPE_CHECKING:
    import torch


def lose_update(update: Callable[[torch.optim.AdamW], object], optimizer: torch.optim.AdamW) -> None:
    """Carries an update out, and puts every parameter back after it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.clone() for parameter in parameters]
    update(optimizer)
    for parameter, value in zip(parameters, before, strict=True):
        parameter.copy_(value)


def plant(fired: Fired) -> None:
    """Lose every update."""
    import torch

    update = torch.optim.AdamW.step

    @torch.no_grad()
    def lost_update(optimizer: torch.optim.AdamW) -> None:
        lose_update(update, optimizer)
        fired.count += 1

    torch.optim.AdamW.step = lost_update


if __name__ == "__main__":
    run_with_fault(plant)
