"""Repairs Megatron's local layers: norms and a value head with marked parameters, and hooks where an argument is lost.

Marks are the attributes that Megatron hangs on parameters; the functions here read and set them with their types. The
hooks are for megatron-core 0.16.1, and change no other value.
"""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlock

from mock_scheduler.megatron.partition import mark_sequence_parallel


def repair_layers(gpt: GPTModel) -> None:
    """Puts the hooks in that a model of this configuration needs; none for one without experts."""
    if gpt.config.num_moe_experts is None:
        return
    if gpt.config.recompute_method == "block":
        _hand_mask_to_layers(gpt.decoder)
    if gpt.config.add_bias_linear:
        _copy_outputs_of_experts(gpt)


def _hand_mask_to_layers(block: TransformerBlock) -> None:
    """Lets layers outside block recomputation have the padding mask too.

    Megatron hands it to the recomputed ones alone (``TransformerBlock._checkpointed_forward``), so the routers of the
    others took padding for real tokens, all of one row: gradients were wrong by their whole size. It can go when that
    method passes ``padding_mask`` to every layer.
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
    """Lets an expert's second bias be added.

    ``MLP.forward`` adds it in place to the unchanged result of a custom autograd function, and autograd refuses this.
    """

    def copy(
        _: torch.nn.Module, args: tuple[object, ...], output: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return output[0].clone(), output[1]

    for module in gpt.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert:
            module.register_forward_hook(copy)


class TorchNorm:
    """Builds ``torch.nn.LayerNorm`` or ``torch.nn.RMSNorm`` with parameters marked as Megatron expects.

    Megatron's own wrapper refuses sequence parallelism because it does not mark its parameters: a norm over a part of
    the sequence has a partial gradient, and ``finalize_model_grads`` sums marked parameters alone over tp.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> torch.nn.Module:
        """A norm over ``hidden_size``, of the kind that ``config.normalization`` names; the rest is Megatron's."""
        norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype)
        mark_sequence_parallel(norm, config.sequence_parallel)
        return norm


class ValueHead(torch.nn.Linear):
    """The head of a critic: one value per token, in the place of ``GPTModel``'s output layer; every tp rank holds it
    whole.

    Under sequence parallelism a rank computes the values of its part of the sequence, to be gathered; the gradient of
    the weight is partial there, and summed over tp because it is marked ``sequence_parallel``.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, bias=True, dtype=config.params_dtype)
        self._splits_sequence = config.sequence_parallel
        mark_sequence_parallel(self, config.sequence_parallel)

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, weight: torch.Tensor | None = None, **unused: object
    ) -> tuple[torch.Tensor, None]:
        """Values ``[s, b, 1]`` of hidden states ``[s, b, h]``, in float32 or wider, and no bias, as Megatron asks."""
        values = super().forward(hidden_states)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        if self._splits_sequence:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
