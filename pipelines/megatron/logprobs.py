"""Computes log-probabilities and entropy over a vocabulary split over tensor-parallel ranks, and draws tokens.

Computed in the logits' dtype, or in float32 where the logits are narrower. float64 stays float64 throughout, so an
alignment can be repeated in float64; Megatron's own cross-entropy narrows to float32. Sampling takes its random numbers
as arguments, so it is repeatable whatever the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipelines.config.engine import GeneratingArgs


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabShard:
    """Holds this rank's columns of the vocabulary: ``[start, start + width)``.

    allowed: bool ``[width]``, True on tokens that can be drawn, never on vocabulary padding or tokens excluded from
    sampling. All others have probability 0. ``None``: all columns are allowed.
    """

    start: int
    width: int
    allowed: torch.Tensor | None = None
    group: dist.ProcessGroup | None = None


#: What autograd hands to a function's forward and backward pass.
_Context = Any


def _all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


class Exponentials(NamedTuple):
    """A shard's exponentials and logits below the maximum, where its targets are, and whether they are in it."""

    exponentials: torch.Tensor
    shifted: torch.Tensor
    local_targets: torch.Tensor
    is_local: torch.Tensor


def masked_logits(logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Logits ``[B, T, V / tp]`` with the lowest number where a token cannot be drawn."""
    if shard.allowed is None:
        return logits
    return logits.masked_fill(~shard.allowed, torch.finfo(logits.dtype).min)


def exponentiate(logits: torch.Tensor, maximum: torch.Tensor, targets: torch.Tensor, shard: VocabShard) -> Exponentials:
    """Takes exponentials below the maximum ``[B, T]`` over all shards."""
    shifted = logits - maximum.unsqueeze(-1)
    exponentials = shifted.exp()
    if shard.allowed is not None:
        # 0 · anything finite is 0: excluded columns then add nothing to entropy or gradient.
        exponentials = exponentials.masked_fill(~shard.allowed, 0.0)
        shifted = shifted.masked_fill(~shard.allowed, 0.0)
    local_targets = targets - shard.start
    is_local = (local_targets >= 0) & (local_targets < shard.width)
    return Exponentials(exponentials, shifted, torch.where(is_local, local_targets, 0), is_local)


def local_sums(local: Exponentials) -> torch.Tensor:
    """Returns ``[3, B, T]``: the shard's parts of Z, z_t and sum_j exp(z_j) z_j."""
    target_logits = local.shifted.gather(-1, local.local_targets.unsqueeze(-1)).squeeze(-1)
    return torch.stack(
        (
            local.exponentials.sum(dim=-1),
            torch.where(local.is_local, target_logits, torch.zeros_like(target_logits)),
            (local.exponentials * local.shifted).sum(dim=-1),
        )
    )


def local_gradient(
    local: Exponentials,
    total: torch.Tensor,
    log_total: torch.Tensor,
    entropy: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Returns the gradient of the shard's logits from those of log-probability and entropy."""
    grad_logprobs, grad_entropy = grads
    probabilities = local.exponentials / total.unsqueeze(-1)
    log_p_plus_entropy = local.shifted - (log_total - entropy).unsqueeze(-1)
    grad = -probabilities * (grad_logprobs.unsqueeze(-1) + grad_entropy.unsqueeze(-1) * log_p_plus_entropy)
    # Each row has one target, so a plain scatter is enough; scatter_add_ has no deterministic form on CUDA.
    index = local.local_targets.unsqueeze(-1)
    hit = (grad_logprobs * local.is_local).unsqueeze(-1).to(grad.dtype)
    grad.scatter_(-1, index, grad.gather(-1, index) + hit)
    return grad


class _VocabParallelLogprobs(torch.autograd.Function):
    """log p(target) and H(p) of p = softmax(logits); gradients are local to the shards.

    With z the shifted logits and Z the sum of exp(z):
    log p_t = z_t - log Z, d log p_t / d z_j = 1[j = t] - p_j;
    H = log Z - sum_j p_j z_j, dH / dz_j = -p_j (z_j - log Z + H).
    """

    @staticmethod
    def forward(
        ctx: _Context, targets: torch.Tensor, shard: VocabShard, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        masked = masked_logits(logits, shard)
        maximum = _all_reduce(masked.amax(dim=-1), dist.ReduceOp.MAX, shard.group)
        local = exponentiate(masked, maximum, targets, shard)
        total, target, weighted = _all_reduce(local_sums(local), dist.ReduceOp.SUM, shard.group)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(total, log_total, entropy, *local)
        return target - log_total, entropy

    @staticmethod
    def backward(
        ctx: _Context, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        total, log_total, entropy, *local = ctx.saved_tensors
        grads = (grad_logprobs, grad_entropy)
        return None, None, local_gradient(Exponentials(*local), total, log_total, entropy, grads)


def vocab_parallel_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard, *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probability of each target and entropy of its distribution, softmax(logits / temperature).

    logits: floating ``[B, T, V / tp]``, this rank's columns; targets: int64 ``[B, T]``, global token ids.
    Returns two ``[B, T]`` tensors, equal on all ranks of the group, in the logits' dtype or float32 if that is
    wider. Every rank of the group must call it: one MAX and one SUM all-reduce forward, none backward.
    """
    widened = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs, entropy = _VocabParallelLogprobs.apply(targets, shard, widened / temperature)
    return logprobs, entropy


def process_logits(logits: torch.Tensor, args: GeneratingArgs) -> torch.Tensor:
    """Computes log-probabilities of the sampled distribution, float64 ``[n, V]``; -inf where a token is cut off.

    logits: floating ``[n, V]``, whole vocabulary. Temperature first, then top-k, then top-p over the rest: the smallest
    set of most likely tokens whose probability reaches ``top_p`` (arXiv 1904.09751).
    """
    scaled = logits.double() / args.temperature
    if 0 < args.top_k < scaled.shape[-1]:
        threshold = scaled.topk(args.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    if args.top_p < 1.0:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        cut = torch.zeros_like(scaled, dtype=torch.bool).scatter(-1, order, before >= args.top_p)
        scaled = scaled.masked_fill(cut, -torch.inf)
    return scaled.log_softmax(dim=-1)


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, args: GeneratingArgs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token per row by inversion: the first whose cumulative probability exceeds the row's number.

    logits: floating ``[n, V]``; uniforms: float64 ``[n]`` in [0, 1). Returns tokens, int64 ``[n]``, and their
    log-probabilities in the processed distribution, float64 ``[n]``.
    """
    logprobs = process_logits(logits, args)
    cumulative = logprobs.exp().cumsum(dim=-1)
    last_possible = (logprobs > -torch.inf).long().cumsum(dim=-1).argmax(dim=-1)
    tokens = torch.searchsorted(cumulative, uniforms.unsqueeze(-1), right=True).squeeze(-1)
    tokens = torch.minimum(tokens, last_possible)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
