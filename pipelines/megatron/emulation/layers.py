"""Lets this pipeline's own layers compute as virtual ranks: attention over rows, the head of a critic, its router."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.transformer.dot_product_attention import DotProductAttention

from mock_scheduler.megatron.emulation.attention import emulate_core
from mock_scheduler.megatron.emulation.engine import MEGATRON_MODULES
from mock_scheduler.megatron.emulation.experts import emulate_experts, emulate_gate
from mock_scheduler.megatron.emulation.modules import EmulatedModules, Emulators
from mock_scheduler.megatron.emulation.parts import cut_graph, join_graph, ordered_sum
from pipelines.megatron.layers.attention import RowAttention
from pipelines.megatron.layers.expert_router import LayoutInvariantRouter, unbiased_scores
from pipelines.megatron.layers.experts import RowMoELayer
from pipelines.megatron.layers.repairs import ValueHead


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
    """For each rank, ``count_by_row`` added over all of its replica; whole numbers, so that the order is none."""
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
