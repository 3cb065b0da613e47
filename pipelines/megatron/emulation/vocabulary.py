"""Computes log-probabilities as tp ranks do: each its part of the vocabulary, and sums in the order of the ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from mock_scheduler.megatron.emulation.parts import Context, cut_graph
from pipelines.megatron.logprobs import (
    Exponentials,
    VocabShard,
    exponentiate,
    local_gradient,
    local_sums,
    masked_logits,
)


class _LogprobsOfParts(torch.autograd.Function):
    """``vocab_parallel_logprobs`` of several ranks' logits."""

    @staticmethod
    def forward(
        ctx: Context, targets: torch.Tensor, shards: Sequence[VocabShard], *logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        masked = [masked_logits(one, shard) for one, shard in zip(logits, shards, strict=True)]
        maximum = functools.reduce(torch.maximum, [one.amax(dim=-1) for one in masked])
        parts = [exponentiate(one, maximum, targets, shard) for one, shard in zip(masked, shards, strict=True)]
        # In a layout this sum is an all-reduce over tp.
        total, target, weighted = functools.reduce(torch.add, [local_sums(part) for part in parts])
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(total, log_total, entropy, *(tensor for part in parts for tensor in part))
        return target - log_total, entropy

    @staticmethod
    def backward(
        ctx: Context, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        total, log_total, entropy, *saved = ctx.saved_tensors
        size = len(Exponentials._fields)
        parts = [Exponentials(*saved[start : start + size]) for start in range(0, len(saved), size)]
        grads = (grad_logprobs, grad_entropy)
        return (None, None, *(local_gradient(part, total, log_total, entropy, grads) for part in parts))


def logprobs_of_parts(
    logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard, *, num_parts: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy ``[B, T]`` of a vocabulary that so many ranks would share; shard: all of it."""
    widened = logits.to(torch.promote_types(logits.dtype, torch.float32))
    parts = [part / temperature for part in cut_graph(widened, -1, num_parts)]
    logprobs, entropy = _LogprobsOfParts.apply(targets, _shards_of_ranks(shard, num_parts), *parts)
    return logprobs, entropy


def _shards_of_ranks(shard: VocabShard, num_parts: int) -> list[VocabShard]:
    width = shard.width // num_parts
    starts = range(0, width * num_parts, width)
    masks = [None if shard.allowed is None else shard.allowed[start : start + width] for start in starts]
    return [
        VocabShard(
            start=shard.start + start,
            width=width,
            # A rank whose columns are all allowed masks nothing.
            allowed=None if mask is None or bool(mask.all()) else mask,
        )
        for start, mask in zip(starts, masks, strict=True)
    ]
