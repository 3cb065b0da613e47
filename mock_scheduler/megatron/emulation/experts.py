"""Lets layers with experts compute as virtual ranks: each one's router, and experts over several ranks' tokens at once.

Tokens lie as everywhere here: replicas that compute together, their cp ranks, and of each its tp ranks, one rank's
after another's. The dispatcher sorts them by expert and leaves them in this order, the order in which an expert gets
them from the ranks of its group (megatron-core 0.16.1). It remains to cut each expert's tokens by group, and each
group's product is one of its own. All-to-all dispatch brings each expert's output back, to be added on the token's rank
as in one process; all-gather dispatch adds them on each rank with experts, and then over these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import permute, router_gating_linear, unpermute
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

from mock_scheduler.megatron.emulation.accumulators import ParameterSplit
from mock_scheduler.megatron.emulation.arithmetic import column_product, row_product
from mock_scheduler.megatron.emulation.modules import EmulatedModules
from mock_scheduler.megatron.emulation.parts import copies_graph, sum_graph

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def emulate_experts(layer: MoELayer, modules: EmulatedModules) -> None:
    """Let a layer with experts compute rank by rank."""
    modules.emulate(layer.router)
    if layer.shared_experts is not None:
        modules.emulate(layer.shared_experts)
    if isinstance(layer.token_dispatcher, MoEAllGatherTokenDispatcher):
        _emulate_gathering(layer.token_dispatcher, modules)
    _emulate_local_experts(layer, modules)


def emulate_gate(router: TopKRouter, modules: EmulatedModules) -> None:
    """Let a router's weight be multiplied with the tokens of each rank."""
    modules.register(router, modules.split(modules.over_tokens))
    # Without ``moe_router_dtype``, in the dtype of the hidden state (``Router.gating``).
    dtype = _ROUTER_DTYPES.get(router.config.moe_router_dtype)

    def gating(hidden: torch.Tensor) -> torch.Tensor:
        weights, biases = modules.taken(router)
        parts = modules.tokens.cut(hidden, len(weights))
        logits = [
            router_gating_linear(*three, dtype or hidden.dtype) for three in zip(parts, weights, biases, strict=True)
        ]
        return modules.tokens.join(logits)

    modules.replace(router, gating, method="gating")


def _emulate_local_experts(layer: MoELayer, modules: EmulatedModules) -> None:
    """Makes each expert's products of the tokens of each group of ranks, one after another."""
    plan = modules.plan.experts
    assert plan is not None
    experts = layer.experts.local_experts
    # Each group of ranks holds every expert once, and accumulates the gradient of its own tokens.
    split = ParameterSplit(sharing="whole", num_replicas=plan.groups, is_expert=plan.is_apart)
    for expert in experts:
        modules.register(expert.linear_fc1, split)
        modules.register(expert.linear_fc2, split)

    def forward(
        permuted: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        # Tokens lie expert by expert, and within an expert group by group: the sizes follow in this order.
        of_groups = [part.sum(dim=0) for part in _routing_map(layer).chunk(plan.groups)]
        sizes = torch.stack(of_groups, dim=1).flatten().tolist()
        pieces = iter(zip(torch.split(permuted, sizes), torch.split(probs, sizes), strict=True))
        outputs = []
        for expert in experts:
            weights = [modules.accumulators.take(linear.weight) for linear in (expert.linear_fc1, expert.linear_fc2)]
            for (first,), (second,) in zip(*weights, strict=True):
                outputs.append(_expert_output(expert, *next(pieces), first, second))
        return torch.cat(outputs), None

    modules.replace(layer.experts, forward)


def _routing_map(layer: MoELayer) -> torch.Tensor:
    """Which experts each token has chosen ``[tokens, experts]``, of a layer whose tokens are dispatched."""
    dispatcher = layer.token_dispatcher
    chosen: torch.Tensor = (
        dispatcher.local_map if isinstance(dispatcher, MoEAllGatherTokenDispatcher) else dispatcher.routing_map
    )
    return chosen


def _emulate_gathering(dispatcher: MoEAllGatherTokenDispatcher, modules: EmulatedModules) -> None:
    """Let each rank of a group take all tokens' copies for its experts, whose outputs are added on it, then over ranks.

    ``MoEAllGatherTokenDispatcher``: the gradient of the gathered tokens is added over the ranks likewise.
    """
    plan = modules.plan.experts
    assert plan is not None
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(hidden: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dispatcher.hidden_shape_before_permute = hidden.shape
        dispatcher.local_map, dispatcher.local_probs = dispatcher.routing_map, probs
        dispatcher.routing_map = None
        held.clear()
        tokens: list[torch.Tensor] = []
        # Experts are dealt to ranks in blocks, so that one rank's after another's are in the order of all.
        maps = [part.contiguous() for part in dispatcher.local_map.chunk(plan.sources, dim=1)]
        for copy, chosen in zip(copies_graph(hidden, plan.sources), maps, strict=True):
            own, _, places = permute(copy, chosen, num_out_tokens=chosen.sum())
            tokens.append(own)
            held.append((chosen, places))
        # Transposed, so that weights lie expert by expert, as ``permute`` has laid the tokens.
        weights = probs.T.contiguous().masked_select(dispatcher.local_map.T.contiguous())
        return torch.cat(tokens), dispatcher.local_map.sum(dim=0).long().cpu(), weights

    def add(outputs: torch.Tensor) -> torch.Tensor:
        own: Sequence[torch.Tensor] = torch.split(outputs, [len(places) for _, places in held])
        parts = [
            unpermute(part, places, restore_shape=dispatcher.hidden_shape_before_permute, routing_map=chosen)
            for part, (chosen, places) in zip(own, held, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        # The sum over ranks is in the dtype of the router's weights, which may be wider.
        return sum_graph([part.to(dispatcher.local_probs.dtype) for part in parts]).to(outputs.dtype)

    modules.replace(dispatcher, take, method="dispatch_postprocess")
    modules.replace(dispatcher, add, method="combine_preprocess")


def _expert_output(
    expert: MLP, tokens: torch.Tensor, probs: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    """Returns an expert's MLP of tokens ``[n, h]``, weighted by their ``probs`` ``[n]``: ``MLP.forward`` (0.16.1)."""
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
