"""A planted fault: tensor-parallel rank 1 computes the first linear layer of layer 1's MLP 1 % too large.

Run as the ``entry`` of an alignment candidate under tp 2.
"""

from __future__ import annotations

import torch

from tests.faults.harness import Fired, run_with_fault

FAULTY = "decoder.layers.1.mlp.linear_fc1"


def plant(fired: Fired) -> None:
    """Scale what the layer gives, before anybody else sees it."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_layer import TransformerLayer

    build = TransformerLayer.__init__

    def scale(
        module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        fired.count += 1
        return output[0] * (1.01 if parallel_state.get_tensor_model_parallel_rank() == 1 else 1.0), output[1]

    def build_with_fault(self: TransformerLayer, *arguments: object, **named: object) -> None:
        build(self, *arguments, **named)
        if self.layer_number == 2:  # counted from 1
            self.mlp.linear_fc1.register_forward_hook(scale)

    TransformerLayer.__init__ = build_with_fault


if __name__ == "__main__":
    run_with_fault(plant)
