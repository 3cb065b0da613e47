"""Faults of routers and experts on one ep rank: who is chosen, with what weight, in what precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from pipelines.megatron.layers import expert_router
from pipelines.megatron.layers.expert_router import LayoutInvariantRouter
from tests.faults.counting import Fired
from tests.faults.fault import Injector
from tests.faults.injectors.patching import ep_rank, replacing
from tests.faults.injectors.softmax import round_to_bfloat16

Choice = tuple[torch.Tensor, torch.Tensor]


def _choosing(choose_otherwise: Callable[..., Choice]) -> Injector:
    """The second ep rank chooses experts in another way, which gets the right one and its arguments: a ``choose`` is
    among these."""

    def wrap(fired: Fired, choose: Callable[..., Choice]) -> Callable[..., Choice]:
        def chosen(logits: torch.Tensor, **options: Any) -> Choice:
            if ep_rank() != 1:
                return choose(logits, **options)
            fired.count += 1
            return choose_otherwise(choose, logits, **options)

        return chosen

    return replacing(expert_router, "choose_experts", wrap)


def _choose_one_less(choose: Callable[..., Choice], logits: torch.Tensor, /, *, topk: int, **options: object) -> Choice:
    return choose(logits, topk=topk - 1, **options)


def _score_by_softmax(choose: Callable[..., Choice], logits: torch.Tensor, /, **options: object) -> Choice:
    return choose(logits, **{**options, "score_function": "softmax"})


def _leave_unnormalised(choose: Callable[..., Choice], logits: torch.Tensor, /, **options: object) -> Choice:
    _, chosen = choose(logits, **options)
    return logits.sigmoid() * chosen, chosen


def _drop_tokens(choose: Callable[..., Choice], logits: torch.Tensor, /, **options: object) -> Choice:
    """The first expert has no room for its first three tokens."""
    weights, chosen = choose(logits, **options)
    kept = torch.ones_like(chosen)
    kept[chosen[:, 0].nonzero().flatten()[:3], 0] = False
    return weights * kept, chosen & kept


one_choice_less = _choosing(_choose_one_less)
scored_by_softmax = _choosing(_score_by_softmax)
weights_not_normalised = _choosing(_leave_unnormalised)
tokens_dropped = _choosing(_drop_tokens)


def _round_logits(fired: Fired, multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def rounded(self: LayoutInvariantRouter, hidden: torch.Tensor) -> torch.Tensor:
        logits = multiply(self, hidden)
        fired.count += int(ep_rank() == 1)
        return round_to_bfloat16(logits) if ep_rank() == 1 else logits

    return rounded


router_rounded = replacing(LayoutInvariantRouter, "gating", _round_logits)


def _computing(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Injector:
    """The experts of the second ep rank compute with other probabilities; ``change`` may change the module too."""

    def wrap(fired: Fired, compute: Callable[..., Any]) -> Callable[..., Any]:
        def computed(self: SequentialMLP, hidden: object, counts: object, probabilities: torch.Tensor) -> object:
            if ep_rank() != 1:
                return compute(self, hidden, counts, probabilities)
            fired.count += 1
            held = self.local_experts
            try:
                return compute(self, hidden, counts, change(self, probabilities))
            finally:
                self.local_experts = held

        return computed

    return replacing(SequentialMLP, "forward", wrap)


def _exchange_experts(module: Any, probabilities: torch.Tensor) -> torch.Tensor:
    first, second = module.local_experts
    module.local_experts = torch.nn.ModuleList((second, first))
    return probabilities


experts_exchanged = _computing(_exchange_experts)
probability_one = _computing(lambda module, probabilities: torch.where(probabilities > -1.0, 1.0, probabilities))
