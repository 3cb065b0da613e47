"""A router of experts whose losses and counters are the same in every layout, batching and padding.

Megatron's router balances whatever tokens a rank happens to hold: padding counts, a micro-batch of few response tokens
weighs as much as one of many, and in megatron-core 0.16.1 tp and cp scale the losses wrongly (``docs/layouts.md``).
Here every token of a layer belongs to a row. With c_re the tokens of row r whose K highest scores include expert e,
N_r its real tokens, n_r its response tokens, P_te the scores of token t, E experts and coefficient a (where routing is
replayed without an expert bias, c_re counts the replayed choice)::

    seq_aux_loss:  sum_r n_r · a·E / (K·N_r²) · sum_e c_re · sum_{t in r} P_te
    aux_loss:      the same with all rows of a micro-batch taken as one
    z-loss:        sum_r n_r · a / N_r · sum_{t in r} logsumexp(logits_t)²       (always by row)

Divided by the response tokens of the update, as ``finalize_model_grads`` divides, they are means weighted by response
tokens. Without ``calculate_per_token_loss`` n_r is 1 over the number of rows in the micro-batch. Only the counts cross
ranks: each rank attaches the terms of its own tokens, so that the sum of gradients over tp, cp and dp is the whole one.
Formulas: Switch Transformer (arXiv 2101.03961), eq. 4 to 6, and ST-MoE (arXiv 2202.08906), eq. 5, as in Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay

from pipelines.megatron.layers.router_ledger import RouterLedger
from pipelines.megatron.layers.routing import choose_highest, rows_of


def attach_router_ledger(chunks: Iterable[torch.nn.Module]) -> RouterLedger:
    """Returns one ledger for all layout-invariant routers of these model chunks."""
    ledger = RouterLedger()
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, LayoutInvariantRouter):
                module.ledger = ledger
    return ledger


class LayoutInvariantRouter(TopKRouter):
    """Routes top-k as Megatron's router, with the losses and counters of the module's docstring, and without narrowing.

    Scores are computed in float32 or, where the logits are wider, as wide as these. Losses, ledger and the counter of
    the expert bias change in training passes with a gradient alone, so that recomputation does not count twice.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.ledger = RouterLedger()  # its own until ``attach_router_ledger``
        self.router_replay: RouterReplay | None = None

    def forward(
        self, input: torch.Tensor, padding_mask: torch.Tensor | None = None, **unused: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the experts' weights, in the logits' dtype, and the chosen experts, bool; both ``[s · b, E]``.

        input: ``[s, b, h]``. padding_mask: int64 places ``[s, b]``; ``None``: every token is real and of row 0.
        Communicates over tp × cp where there is a loss.
        """
        self._maintain_float32_expert_bias()
        logits = self.gating(input).view(-1, self.num_experts)
        return self.route(logits, None if padding_mask is None else padding_mask.flatten())

    def route(
        self,
        logits: torch.Tensor,
        places: torch.Tensor | None,
        *,
        counts: torch.Tensor | None = None,
        rank: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``forward``'s tensors for logits ``[n, E]`` of tokens at places int64 ``[n]``.

        counts: ``count_by_row`` summed over the ranks that compute the micro-batch; ``None``: the sum is made here.
        rank: as for ``RouterLedger.add``.
        """
        if not self.has_losses_now:
            return self._choose(logits, places)
        places = logits.new_zeros(len(logits), dtype=torch.int64) if places is None else places
        load_balancing, z = self._losses(logits, places, counts)
        if self.config.moe_z_loss_coeff:
            logits = MoEAuxLossAutoScaler.apply(logits, z * self.config.moe_z_loss_coeff)
        probs, routing_map = self._choose(logits, places)
        if self._balancing_coeff:
            probs = MoEAuxLossAutoScaler.apply(probs, load_balancing * self._balancing_coeff)
        self._count(routing_map & (places >= 0).unsqueeze(1), load_balancing, z, rank=rank)
        return probs, routing_map

    @property
    def has_losses_now(self) -> bool:
        """Whether this is a pass whose losses and counts are taken: of training, with a gradient."""
        return bool(self.training and torch.is_grad_enabled())

    @property
    def has_losses(self) -> bool:
        """Whether the configuration has a loss of routers."""
        return bool(self._balancing_coeff or self.config.moe_z_loss_coeff)

    @property
    def _balancing_coeff(self) -> float:
        return 0.0 if self.routing_type == "none" else self.config.moe_aux_loss_coeff

    def _choose(self, logits: torch.Tensor, places: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        routing, choose = self.ledger.routing, choose_highest
        if routing is not None and routing.action is not None and places is not None and self.layer_number is not None:
            self.router_replay = self.router_replay or RouterReplay()
            choose = partial(routing.choose, self.router_replay, self.layer_number - 1, places)
        return choose_experts(
            logits,
            choose=choose,
            topk=self.topk,
            score_function=self.score_function,
            pre_softmax=self.config.moe_router_pre_softmax,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            expert_bias=self.expert_bias,
        )

    def _losses(
        self, logits: torch.Tensor, places: torch.Tensor, counts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of load balancing loss and z-loss, without coefficients; 0 where there is none."""
        zero = logits.new_zeros((), dtype=_at_least_float32(logits))
        if not self.has_losses:
            return zero, zero
        slots = self._slots(places)
        scores = unbiased_scores(logits, score_function=self.score_function)
        if counts is None:
            counts = self._counts_of_ranks(self.count_by_row(scores, places))
        num_tokens = counts.sum(dim=1) / self.topk
        weights = self._weigh_rows(num_tokens)
        z = zero
        if self.config.moe_z_loss_coeff:
            squares = logits.to(zero.dtype).logsumexp(dim=-1).square()
            z = (_factor_of_slot(weights / num_tokens.clamp(min=1.0), squares)[slots] * squares).sum()
        if not self._balancing_coeff:
            return zero, z
        if self.routing_type == "aux_loss":
            counts, num_tokens, weights = (one.sum(dim=0, keepdim=True) for one in (counts, num_tokens, weights))
            slots = (places < 0).long()
        scale = weights * self.num_experts / (self.topk * num_tokens.clamp(min=1.0).square())
        return (_factor_of_slot(scale.unsqueeze(1) * counts, scores)[slots] * scores).sum(), z

    def _weigh_rows(self, num_tokens: torch.Tensor) -> torch.Tensor:
        """n_r, float64 ``[num_rows]``, of the rows that have tokens in this micro-batch; 0 for the others."""
        is_present = (num_tokens > 0).double()
        if self.calculate_per_token_loss:
            return self.ledger.row_weights * is_present
        return is_present / is_present.sum().clamp(min=1.0)

    def count_by_row(self, scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Returns float64 ``[num_rows, E]``: this rank's tokens of each row whose highest scores include an expert.

        scores: ``[n, E]``, as ``unbiased_scores`` gives. places: int64 ``[n]``.
        """
        num_rows, routing = len(self.ledger.row_weights), self.ledger.routing
        indices = scores.topk(self.topk, dim=1).indices
        # A bias is no part of these scores, so even without replay they count another choice than the router's.
        if routing is not None and self.expert_bias is None and self.layer_number is not None:
            indices = routing.replayed(self.layer_number - 1, places, indices)
        chosen = torch.zeros_like(scores, dtype=torch.float64)
        chosen = chosen.scatter(1, indices, 1.0)
        return chosen.new_zeros(num_rows + 1, self.num_experts).index_add(0, self._slots(places), chosen)[:num_rows]

    def _slots(self, places: torch.Tensor) -> torch.Tensor:
        """Each token's row; one more, the last, takes the padding."""
        row_ids = rows_of(places)
        return torch.where(row_ids < 0, len(self.ledger.row_weights), row_ids)

    def _counts_of_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        """Returns the counts over tp × cp."""
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        return counts

    def _count(self, real_map: torch.Tensor, load_balancing: torch.Tensor, z: torch.Tensor, *, rank: int) -> None:
        tokens_per_expert = real_map.sum(dim=0)
        if self.layer_number is not None:
            self.ledger.add(self.layer_number - 1, load_balancing, z, tokens_per_expert, rank=rank)
        if self.enable_expert_bias:
            self.local_tokens_per_expert += tokens_per_expert

    def _maintain_float32_expert_bias(self) -> None:
        """Keep bias and counter in float32 in a model of any dtype; Megatron (0.16.1) narrows the counter."""
        super()._maintain_float32_expert_bias()
        if self.enable_expert_bias:
            self.local_tokens_per_expert.data = self.local_tokens_per_expert.data.float()


def _at_least_float32(logits: torch.Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _factor_of_slot(factors: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The factors in another tensor's dtype, and a last one of 0 for the tokens that are padding."""
    return torch.cat((factors, torch.zeros_like(factors[:1]))).to(like.dtype)


def unbiased_scores(logits: torch.Tensor, *, score_function: str) -> torch.Tensor:
    """The scores that are balanced, ``[T, E]``, float32 or wider: ``compute_routing_scores_for_aux_loss`` (0.16.1)."""
    logits = logits.to(_at_least_float32(logits))
    if score_function == "softmax":
        return logits.softmax(dim=-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def choose_experts(
    logits: torch.Tensor,
    *,
    topk: int,
    score_function: str,
    pre_softmax: bool = False,
    scaling_factor: float | None = None,
    expert_bias: torch.Tensor | None = None,
    choose: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]] = choose_highest,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses and weighs the experts, both ``[T, E]``: ``topk_routing_with_score_function`` (0.16.1) bit for bit.

    Only float64 logits differ: their scores, float32 there, are float64 here. ``choose``: gives the chosen experts'
    scores and indices by all scores.
    """
    wide = _at_least_float32(logits)
    if score_function == "softmax" and not pre_softmax:
        chosen_logits, indices = choose(logits, topk)
        weights = chosen_logits.softmax(dim=-1, dtype=wide).type_as(logits)
    elif score_function == "softmax":
        weights, indices = choose(logits.softmax(dim=-1, dtype=wide).type_as(logits), topk)
    else:
        scores = logits.to(wide).sigmoid().type_as(logits)
        _, indices = choose(scores if expert_bias is None else scores + expert_bias, topk)
        weights = scores.gather(1, indices)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) if topk > 1 else weights
    if scaling_factor is not None:
        weights = weights * scaling_factor
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)
    return torch.zeros_like(logits).scatter(1, indices, weights), routing_map
