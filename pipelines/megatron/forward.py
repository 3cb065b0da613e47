"""Forward passes without a graph through Megatron's schedules, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

LogitsReduction = Callable[[int, torch.Tensor], torch.Tensor]
"""From a batch's position and its logits to what is kept of them."""


def model_inputs(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Token ids and positions; the causal mask is the layers' own."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return tokens, positions, None


def forward_only(
    model: torch.nn.Module, token_batches: Sequence[torch.Tensor], *, reduce: LogitsReduction
) -> list[torch.Tensor]:
    """``reduce(i, logits)`` of each ``[b, T]`` batch i, without graph; an empty list off the last stage.

    logits: ``[b, T, V / tp]``; they are freed before those of the next batch are computed, so ``reduce`` must not
    return a view of them. All batches must have one shape. Every rank of the model-parallel group must call it.
    """
    model.eval()
    try:
        with torch.no_grad():
            return get_forward_backward_func()(
                forward_step_func=_reduced_logits_step(reduce),
                data_iterator=iter(enumerate(token_batches)),
                model=[model],
                num_microbatches=len(token_batches),
                seq_length=token_batches[0].shape[1],
                micro_batch_size=token_batches[0].shape[0],
                forward_only=True,
                collect_non_loss_data=True,
            )
    finally:
        model.train()


def _reduced_logits_step(
    reduce: LogitsReduction,
) -> Callable[[Iterator[tuple[int, torch.Tensor]], torch.nn.Module], tuple[torch.Tensor, Callable[..., torch.Tensor]]]:
    """Megatron's forward step: the model's output, and the function that reduces it on the last stage."""

    def step(
        data_iterator: Iterator[tuple[int, torch.Tensor]], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
        position, tokens = next(data_iterator)

        def collect(logits: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
            kept = reduce(position, logits)
            # Megatron's loop (0.16.1) holds each output until it has the next, as its deallocate_output_tensor knows.
            logits.data = logits.new_empty(0)
            return kept

        return model(*model_inputs(tokens)), collect

    return step
