"""Repairs of a built model where layers of Megatron (0.16.1) lose an argument or fail; no other value changes."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlock


def repair_layers(gpt: GPTModel) -> None:
    """Everything that a model of this configuration needs; nothing for one without experts."""
    if gpt.config.num_moe_experts is None:
        return
    if gpt.config.recompute_method == "block":
        _hand_mask_to_layers(gpt.decoder)
    if gpt.config.add_bias_linear:
        _copy_outputs_of_experts(gpt)


def _hand_mask_to_layers(block: TransformerBlock) -> None:
    """Let layers that block recomputation leaves out have the padding mask too.

    Megatron hands it to those it recomputes alone (``TransformerBlock._checkpointed_forward``), so that the routers of
    the others took padding for real tokens, all of one row: gradients were wrong by their whole size.
    """
    held: dict[str, object] = {}

    def hold(_: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        held["padding_mask"] = kwargs.get("padding_mask")

    def hand(
        _: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        # In the backward pass a layer that is recomputed brings the mask of its own micro-batch.
        return args, kwargs if kwargs.get("padding_mask") is not None else {**kwargs, **held}

    block.register_forward_pre_hook(hold, with_kwargs=True)
    for layer in block.layers:
        layer.register_forward_pre_hook(hand, with_kwargs=True)


def _copy_outputs_of_experts(gpt: GPTModel) -> None:
    """Let an expert's second bias be added.

    ``MLP.forward`` adds it in place to what a custom autograd function returned as it came, which autograd refuses.
    """

    def copy(
        _: torch.nn.Module, args: tuple[object, ...], output: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return output[0].clone(), output[1]

    for module in gpt.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert:
            module.register_forward_hook(copy)
