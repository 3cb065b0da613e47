"""A planted fault: the loss is scaled by numbers taken in the order of a set of strings, which the hash seed decides.

Without a fixed PYTHONHASHSEED each process goes through the set in its own order. Run as the ``entry`` of the doctor.
"""

from __future__ import annotations

from tests.faults.harness import Fired, run_with_fault

_NAMES = frozenset(f"expert_{number}" for number in range(64))


def plant(fired: Fired) -> None:
    """Let every MLP shift its output by as many positions as a string is long, in the order of a set."""
    import torch
    from megatron.core.transformer.mlp import MLP

    forward = MLP.forward

    def shifted_forward(self: MLP, *arguments: object, **options: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = forward(self, *arguments, **options)
        for name in _NAMES:
            fired.count += 1
            output = output.roll(int(name.removeprefix("expert_")), dims=0)
        return output, bias

    MLP.forward = shifted_forward


if __name__ == "__main__":
    run_with_fault(plant)
