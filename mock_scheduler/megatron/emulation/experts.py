"""Lets layers with experts compute as virtual ranks: each one's router, and experts over several ranks' tokens at once.

Tokens lie as everywhere here: replicas that compute together, their cp ranks, and of each its tp ranks, one rank's
after another's. The dispatcher sorts them by expert and leaves them in this order, the order in which an expert gets
them from the ranks of its group (megatron-core 0.16.1, ``MoEAlltoAllTokenDispatcher``). It remains to cut each expert's
tokens by group, and each group's product is one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import router_gating_linear

from mock_scheduler.megatron.emulation.accumulators import ParameterSplit
from mock_scheduler.megatron.emulation.arithmetic import column_product, row_product
from mock_scheduler.megatron.emulation.modules import EmulatedModules
from mock_scheduler.megatron.emulation.parts import cut_graph, join_graph, ordered_sum
from pipelines.megatron.layers.expert_router import LayoutInvariantRouter, unbiased_scores

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def emulate_experts(layer: MoELayer, modules: EmulatedModules) -> None:
    """Let a layer with experts compute rank by rank; its dispatcher stays as it is."""
    _emulate_gate(layer.router, modules)
    _emulate_router(layer.router, modules)
    if layer.shared_experts is not None:
        modules.mlp(layer.shared_experts)
    _emulate_local_experts(layer, modules)


def _emulate_gate(router: LayoutInvariantRouter, modules: EmulatedModules) -> None:
    """The product of the router's weight with the tokens of each rank."""
    modules.register(router, modules.split(modules.over_tokens))
    dtype = _ROUTER_DTYPES.get(router.config.moe_router_dtype)

    def gating(hidden: torch.Tensor) -> torch.Tensor:
        weights, biases = modules.taken(router)
        parts = cut_graph(hidden, 0, len(weights))
        logits = [
            router_gating_linear(*three, dtype or hidden.dtype) for three in zip(parts, weights, biases, strict=True)
        ]
        return join_graph(logits, 0)

    modules.replace(router, gating, method="gating")


def _emulate_router(router: LayoutInvariantRouter, modules: EmulatedModules) -> None:
    """Routes each rank's logits; counts are summed over all ranks of the same micro-batch."""
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


def _emulate_local_experts(layer: MoELayer, modules: EmulatedModules) -> None:
    """Each expert's products of the tokens of each group of ranks, one after another."""
    plan = modules.plan.experts
    assert plan is not None
    experts = layer.experts.local_experts
    split = ParameterSplit(sharing="whole", num_replicas=plan.groups, is_expert=plan.is_apart)
    for expert in experts:
        modules.register(expert.linear_fc1, split)
        modules.register(expert.linear_fc2, split)

    def forward(
        permuted: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        # Tokens lie expert by expert, and within an expert group by group: the sizes follow in this order.
        of_groups = [part.sum(dim=0) for part in layer.token_dispatcher.routing_map.chunk(plan.groups)]
        sizes = torch.stack(of_groups, dim=1).flatten().tolist()
        pieces = iter(zip(torch.split(permuted, sizes), torch.split(probs, sizes), strict=True))
        outputs = []
        for expert in experts:
            weights = [modules.accumulators.take(linear.weight) for linear in (expert.linear_fc1, expert.linear_fc2)]
            for (first,), (second,) in zip(*weights, strict=True):
                outputs.append(_expert_output(expert, *next(pieces), first, second))
        return torch.cat(outputs), None

    modules.replace(layer.experts, forward)


def _expert_output(
    expert: MLP, tokens: torch.Tensor, probs: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    """An expert's MLP of tokens ``[n, h]``, weighted by their ``probs`` ``[n]``: ``MLP.forward`` (0.16.1)."""
    config = expert.config
    inner = column_product(tokens, [first], [])[0]
    if config.gated_linear_unit:
        gate, up = torch.chunk(inner, 2, dim=-1)
        inner = config.activation_func(gate) * (up + config.glu_linear_offset)
    else:
        inner = config.activation_func(inner)
    # Probabilities may be wider than the activation; the product is rounded back before the second matrix.
    weighted = (inner * probs.unsqueeze(-1)).to(inner.dtype)
    return row_product([weighted], [second])
