"""A planted fault: under tp 2, rank 1 gives twice its own part of layer 1's projection, and not the sum over tp."""

from __future__ import annotations

import torch

from tests.faults.harness import Fired, run_with_fault


def plant(fired: Fired) -> None:
    """Replace what the projection gives, before anybody else sees it."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_layer import TransformerLayer

    build = TransformerLayer.__init__

    def keep_part(
        module: torch.nn.Module, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        fired.count += 1
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            return output
        part = torch.nn.functional.linear(inputs[0], module.weight)  # type: ignore[arg-type]
        return 2.0 * part + (output[0] - output[0].detach()) * 0.0, output[1]

    def build_with_fault(self: TransformerLayer, *arguments: object, **named: object) -> None:
        build(self, *arguments, **named)
        if self.layer_number == 2:  # counted from 1
            self.self_attention.linear_proj.register_forward_hook(keep_part)

    TransformerLayer.__init__ = build_with_fault


if __name__ == "__main__":
    run_with_fault(plant)
