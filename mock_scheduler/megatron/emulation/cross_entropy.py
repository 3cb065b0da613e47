"""Computes Megatron's cross-entropy of labels as tp ranks do, each with its part of the vocabulary.

``VocabParallelCrossEntropy`` of megatron-core 0.16.1: a maximum over all ranks, sums of exponentials and the target's
logit added in the order of the ranks, and the gradient of each rank's logits from its own exponentials.
"""

from __future__ import annotations

import functools

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

from mock_scheduler.megatron.emulation.modules import EmulatedModules
from mock_scheduler.megatron.emulation.parts import Context, cut_graph, ordered_sum


class _CrossEntropyOfParts(torch.autograd.Function):
    """``_VocabParallelCrossEntropy`` of several ranks' logits ``[s, b, V / tp]``, without smoothing."""

    @staticmethod
    def forward(ctx: Context, labels: torch.Tensor, *logits: torch.Tensor) -> torch.Tensor:
        widened, maxima = zip(*map(VocabParallelCrossEntropy.calculate_logits_max, logits), strict=True)
        # A maximum is exact, so its order is none; the two sums below go rank by rank.
        maximum = functools.reduce(torch.maximum, maxima)
        width = logits[0].shape[-1]
        # Each overwrites its logits by their exponentials, as on a rank.
        masks, targets, predicted, sums, exponentials = zip(
            *(
                VocabParallelCrossEntropy.calculate_predicted_logits(
                    own, labels, maximum, part * width, (part + 1) * width
                )
                for part, own in enumerate(widened)
            ),
            strict=True,
        )
        target, total = ordered_sum(predicted), ordered_sum(sums)
        softmax, losses = zip(
            *(VocabParallelCrossEntropy.calculate_cross_entropy_loss(own, target, total) for own in exponentials),
            strict=True,
        )
        ctx.num_parts = len(logits)
        ctx.save_for_backward(*softmax, *masks, *targets)
        # All ranks hold the same loss of a token, made of the same two sums.
        return losses[0]

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, size = ctx.saved_tensors, ctx.num_parts
        of_ranks = zip(saved[:size], saved[size : 2 * size], saved[2 * size :], strict=True)
        return None, *(_gradient_of_rank(softmax, mask, target, grad) for softmax, mask, target in of_ranks)


def _gradient_of_rank(
    softmax: torch.Tensor, mask: torch.Tensor, target: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    # No sum over ranks: the softmax was divided by the sum of all of them, and the rank with the target's row takes 1
    # off.
    lines, columns, update, whole = VocabParallelCrossEntropy.prepare_gradient_calculation_operands(softmax, mask)
    return VocabParallelCrossEntropy.calculate_gradients(lines, columns, target, update, whole, grad)


def emulate_cross_entropy(gpt: GPTModel, modules: EmulatedModules) -> None:
    """Let a model's loss of its labels be computed rank by rank."""
    num_parts = modules.plan.tp
    if num_parts == 1:
        return

    def compute(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        by_place = labels.transpose(0, 1).contiguous()
        losses = _CrossEntropyOfParts.apply(by_place, *cut_graph(logits, -1, num_parts))
        return losses.transpose(0, 1).contiguous()

    modules.replace(gpt, compute, method="compute_language_model_loss")
