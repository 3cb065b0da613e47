"""Lets Megatron's own router of experts route each virtual rank's tokens, with its losses of the tokens of all ranks.

``TopKRouter`` of megatron-core 0.16.1: under sequence parallelism each tp rank routes its part of the sequence, counts
are summed over tp, and each rank attaches the losses of its own tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter

from mock_scheduler.megatron.emulation.experts import emulate_gate
from mock_scheduler.megatron.emulation.modules import EmulatedModules
from mock_scheduler.megatron.emulation.parts import cut_graph, join_graph, ordered_sum, scale_gradient


@dataclass(kw_only=True, slots=True)
class _Counts:
    """The tokens that chose an expert, summed over the ranks of a micro-batch: over all rows ``[E]``, and by row."""

    of_all: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    by_row: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


def emulate_router(router: TopKRouter, modules: EmulatedModules) -> None:
    """Let a router choose experts rank by rank."""
    emulate_gate(router, modules)
    num_parts = modules.plan.tp if modules.plan.sequence_parallel else 1
    counts = _Counts()
    of_rank = _router_of_rank(router, modules, counts, num_parts)

    def forward(
        hidden: torch.Tensor, padding_mask: torch.Tensor | None = None, **unused: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # ``TopKRouter.forward`` begins so: the bias may have been cast with the model.
        router._maintain_float32_expert_bias()
        logits = cut_graph(router.gating(hidden), 0, num_parts)
        masks = [None] * num_parts if padding_mask is None else list(padding_mask.chunk(num_parts))
        if router.training and torch.is_grad_enabled() and router.is_aux_loss_enabled():
            counts.of_all, counts.by_row = _count(router, logits, masks)
        routed = [of_rank.routing(own, padding_mask=mask) for own, mask in zip(logits, masks, strict=True)]
        probs, routing_maps = zip(*routed, strict=True)
        return join_graph(probs, 0), torch.cat(routing_maps)

    modules.replace(router, forward)


@torch.no_grad()
def _count(
    router: TopKRouter, logits: Sequence[torch.Tensor], masks: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts as ``get_tokens_per_expert_and_token_count`` sums them; whole numbers, so that the order is none."""
    maps = [
        compute_routing_scores_for_aux_loss(
            own.view(-1, router.config.num_moe_experts),
            router.topk,
            router.score_function,
            padding_mask=None if mask is None else mask.reshape(-1),
        )[0]
        for own, mask in zip(logits, masks, strict=True)
    ]
    by_row = [one.reshape(len(own), -1).sum(dim=0) for one, own in zip(maps, logits, strict=True)]
    return ordered_sum([one.sum(dim=0) for one in maps]), ordered_sum(by_row)


def _router_of_rank(router: TopKRouter, modules: EmulatedModules, counts: _Counts, num_parts: int) -> TopKRouter:
    """A router that shares everything but its losses, which are of one of so many ranks."""
    # Shallow: weight and bias stay the router's own, and only the three losses are replaced.
    part = copy.copy(router)
    losses = _LossesOfRank(router=router, modules=modules, counts=counts, num_parts=num_parts)
    part._apply_aux_loss, part._apply_seq_aux_loss = losses.apply_aux_loss, losses.apply_seq_aux_loss
    part.apply_z_loss = losses.apply_z_loss
    return part


@dataclass(frozen=True, kw_only=True, slots=True)
class _LossesOfRank:
    """The losses that a router attaches to the tokens of one rank, as ``TopKRouter``'s methods of these names do."""

    router: TopKRouter
    modules: EmulatedModules
    counts: _Counts
    num_parts: int

    def apply_aux_loss(
        self, probs: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, with_padding_mask: bool = False
    ) -> torch.Tensor:
        total, masked = self.counts.of_all, with_padding_mask
        return self._attach(probs, "aux_loss", "load_balancing_loss", scores, chosen, total, rows=1, masked=masked)

    def apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        scores, chosen = scores.reshape(seq_length, -1), chosen.reshape(seq_length, -1)
        total, name, masked = self.counts.by_row, "seq_load_balancing_loss", with_padding_mask
        return self._attach(probs, "seq_aux_loss", name, scores, chosen, total, rows=bsz, masked=masked)

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        router = self.router
        if router.config.moe_z_loss_coeff is None or not (router.training and torch.is_grad_enabled()):
            return logits
        # Each rank takes the mean over its own tokens; divided by the ranks, their sum is the mean over all.
        loss = z_loss_func(logits, router.config.moe_z_loss_coeff / self.num_parts, padding_mask=padding_mask)
        if router.calculate_per_token_loss:
            loss = loss * (logits.shape[0] if padding_mask is None else (~padding_mask).sum())
        return MoEAuxLossAutoScaler.apply(logits, scale_gradient(loss, self.modules.loss_scale))

    def _attach(
        self,
        probs: torch.Tensor,
        kind: str,
        name: str,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        total: torch.Tensor,
        *,
        rows: int,
        masked: bool,
    ) -> torch.Tensor:
        router = self.router
        coefficient = router.get_aux_loss_coeff(kind)
        if coefficient == 0:
            return probs
        topk = router.topk * rows
        # Counts of all ranks and scores of this one: Megatron reduces the counts over the group, and no scores.
        loss = switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=total,
            total_num_tokens=total.sum() / topk if masked else chosen.shape[0] * self.num_parts,
            topk=router.topk,
            num_experts=router.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
        )
        # Rows laid side by side as more experts have the sum of their losses: this takes the mean.
        loss = loss / rows
        return router.attach_and_log_load_balancing_loss(
            probs,
            coefficient,
            scale_gradient(loss, self.modules.loss_scale),
            name,
            router.tp_cp_group,
            valid_token_count=chosen.sum() / topk if masked else chosen.shape[0],
        )
