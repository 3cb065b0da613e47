"""A planted fault: memory of an activation is written past torch's dispatcher, as a faulty kernel or a race would.

Run as the ``entry`` of the doctor.
"""

from __future__ import annotations

import os

from tests.faults.harness import Fired, run_with_fault


def plant(fired: Fired) -> None:
    """Let the last bit of one element of every MLP's output be drawn from the system."""
    import ctypes

    import torch
    from megatron.core.transformer.mlp import MLP

    forward = MLP.forward

    def disturbed_forward(self: MLP, *arguments: object, **options: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = forward(self, *arguments, **options)
        fired.count += 1
        ctypes.c_uint8.from_address(output.data_ptr()).value ^= os.urandom(1)[0]
        return output, bias

    MLP.forward = disturbed_forward


if __name__ == "__main__":
    run_with_fault(plant)
