"""A planted fault: the optimizer's update is lost; every parameter keeps its value.

The first update's loss and gradients are equal to a healthy run's; only what the update did differs. Run as the
``entry`` of an alignment candidate.
"""

from __future__ import annotations

from tests.faults.harness import Fired, run_with_fault


def plant(fired: Fired) -> None:
    """Put every parameter back after the update."""
    import torch

    update = torch.optim.AdamW.step

    @torch.no_grad()
    def lost_update(optimizer: torch.optim.AdamW) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        before = [parameter.clone() for parameter in parameters]
        update(optimizer)
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
        fired.count += 1

    torch.optim.AdamW.step = lost_update


if __name__ == "__main__":
    run_with_fault(plant)
