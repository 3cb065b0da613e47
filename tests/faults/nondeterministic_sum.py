"""A planted fault: the output of every MLP is a sum in an order that no seed fixes, as an atomic addition would give.

The loss moves by a few units in the last place, differently in every run. Run as the ``entry`` of the doctor.
"""

from __future__ import annotations

import os

from tests.faults.harness import Fired, run_with_fault

# 1 in all; in float32 each product rounds, so that their sum depends on the order.
_SHARES = (0.13, 0.07, 0.31, 0.29, 0.11, 0.09)


def plant(fired: Fired) -> None:
    """Let every MLP sum its output from parts, in an order drawn from the system."""
    import torch
    from megatron.core.transformer.mlp import MLP

    def sum_parts(parts: torch.Tensor) -> torch.Tensor:
        fired.count += 1
        order = sorted(range(len(parts)), key=lambda _: os.urandom(8))
        total = parts[order[0]].clone()
        for position in order[1:]:
            total += parts[position]
        return total

    sum_in_any_order = torch.library.custom_op(
        "planted::sum_in_any_order", sum_parts, mutates_args=(), schema="(Tensor parts) -> Tensor"
    )
    sum_in_any_order.register_autograd(lambda context, gradient: gradient.expand(len(_SHARES), *gradient.shape))
    forward = MLP.forward

    def summed_forward(self: MLP, *arguments: object, **options: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = forward(self, *arguments, **options)
        parts = torch.stack([output * share for share in _SHARES])
        return torch.ops.planted.sum_in_any_order(parts), bias

    MLP.forward = summed_forward


if __name__ == "__main__":
    run_with_fault(plant)
