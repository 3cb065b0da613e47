"""A planted fault: with recomputation, the second pass of layer 1's first norm gives 0.1 % more than the first."""

from __future__ import annotations

import torch

from tests.faults.harness import Fired, run_with_fault


def plant(fired: Fired) -> None:
    """Scale what the norm gives where there is a graph: in the pass that a backward pass makes."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    build = TransformerLayer.__init__

    def scale(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        fired.count += 1
        return output * 1.001 if torch.is_grad_enabled() else output

    def build_with_fault(self: TransformerLayer, *arguments: object, **named: object) -> None:
        build(self, *arguments, **named)
        if self.layer_number == 2:  # counted from 1
            self.input_layernorm.register_forward_hook(scale)

    TransformerLayer.__init__ = build_with_fault


if __name__ == "__main__":
    run_with_fault(plant)
