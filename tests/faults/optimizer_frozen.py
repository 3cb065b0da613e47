"""A planted fault: the optimizer's update is lost; every parameter keeps its value.

The first update's loss and gradients are equal to a healthy run's; only what the update did differs. Run as the
``entry`` of an alignment candidate.
"""

from __future__ import annotations

import sys

from pipelines.agentic import main


def plant() -> None:
    """Put every parameter back after the update."""
    import torch

    update = torch.optim.AdamW.step

    @torch.no_grad()
    def lost_update(optimizer: torch.optim.AdamW) -> None:
        global num_lost
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        before = [parameter.clone() for parameter in parameters]
        update(optimizer)
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
        num_lost += 1

    torch.optim.AdamW.step = lost_update


num_lost = 0

if __name__ == "__main__":
    exit_code = main(prepare=plant)
    if exit_code == 0 and num_lost == 0:
        sys.exit("the fault never fired")
    sys.exit(exit_code)
