"""Lets this pipeline's own layers compute as virtual ranks: attention over rows, heads, router, log-probabilities.

Log-probabilities are computed as tp ranks do: each its part of the vocabulary, and sums in the order of the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.transformer.dot_product_attention import DotProductAttention

from mock_scheduler.megatron.emulation.attention import emulate_core
from mock_scheduler.megatron.emulation.engine import MEGATRON_MODULES
from mock_scheduler.megatron.emulation.experts import emulate_experts, emulate_gate
from mock_scheduler.megatron.emulation.modules import EmulatedModules, Emulators
from mock_scheduler.megatron.emulation.parts import Context, cut_graph, join_graph, ordered_sum
from pipelines.megatron.layers.attention import RowAttention
from pipelines.megatron.layers.expert_router import LayoutInvariantRouter, unbiased_scores
from pipelines.megatron.layers.experts import RowMoELayer
from pipelines.megatron.layers.repairs import ValueHead
from pipelines.megatron.logprobs import (
    Exponentials,
    VocabShard,
    exponentiate,
    local_gradient,
    local_sums,
    masked_logits,
)


def emulate_row_attention(attention: RowAttention, modules: EmulatedModules) -> None:
    """Lets attention compute rank by rank; keys of cp ranks are there already, and nothing is kept between passes."""
    emulate_core(attention, modules, attend=DotProductAttention.forward)


def emulate_value_head(head: ValueHead, modules: EmulatedModules) -> None:
    """Lets a critic's head compute the values of each rank's tokens."""
    modules.register(head, modules.split(modules.over_tokens))

    def forward(hidden: torch.Tensor, **unused: object) -> tuple[torch.Tensor, None]:
        weights, biases = modules.taken(head)
        parts = cut_graph(hidden, 0, len(weights))
        values = [F.linear(*three) for three in zip(parts, weights, biases, strict=True)]
        # As ``ValueHead`` does: float32 at least.
        wide = [value.to(torch.promote_types(value.dtype, torch.float32)) for value in values]
        return join_graph(wide, 0), None

    modules.replace(head, forward)


def emulate_row_router(router: LayoutInvariantRouter, modules: EmulatedModules) -> None:
    """Routes each rank's logits; counts are summed over all ranks of the same micro-batch."""
    emulate_gate(router, modules)
    plan = modules.plan
    of_replica = plan.cp * (plan.tp if plan.sequence_parallel else 1)
    num_parts = plan.lanes * of_replica

    def forward(
        hidden: torch.Tensor, padding_mask: torch.Tensor | None = None, **unused: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # ``TopKRouter.forward`` begins so: the bias may have been cast with the model.
        router._maintain_float32_expert_bias()
        logits = [part.view(-1, router.num_experts) for part in cut_graph(router.gating(hidden), 0, num_parts)]
        row_ids = (
            [one.new_zeros(len(one), dtype=torch.int64) for one in logits]
            if padding_mask is None
            else [part.flatten() for part in padding_mask.chunk(num_parts)]
        )
        counts: list[torch.Tensor | None] = [None] * num_parts
        if router.has_losses_now and router.has_losses:
            counts = [*_counts_of_replicas(router, logits, row_ids, of_replica)]
        routed = [
            router.route(own, rows, counts=count, rank=modules.round * num_parts + part)
            for part, (own, rows, count) in enumerate(zip(logits, row_ids, counts, strict=True))
        ]
        probs, routing_maps = zip(*routed, strict=True)
        return join_graph(probs, 0), torch.cat(routing_maps)

    modules.replace(router, forward)


@torch.no_grad()
def _counts_of_replicas(
    router: LayoutInvariantRouter, logits: Sequence[torch.Tensor], row_ids: Sequence[torch.Tensor], of_replica: int
) -> list[torch.Tensor]:
    """Adds ``count_by_row`` over each rank's whole replica; whole numbers, so that the order is none."""
    scores = [unbiased_scores(one, score_function=router.score_function) for one in logits]
    own = [router.count_by_row(*two) for two in zip(scores, row_ids, strict=True)]
    sums = [ordered_sum(own[start : start + of_replica]) for start in range(0, len(own), of_replica)]
    return [total for total in sums for _ in range(of_replica)]


#: Megatron's modules, and the layers that this pipeline puts in their place.
PIPELINE_MODULES: Emulators = {
    **MEGATRON_MODULES,
    RowAttention: emulate_row_attention,
    ValueHead: emulate_value_head,
    LayoutInvariantRouter: emulate_row_router,
    RowMoELayer: emulate_experts,
}


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
