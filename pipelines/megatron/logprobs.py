"""Log-probabilities and entropy over a vocabulary that is split over tensor-parallel ranks.

Computed in the logits' dtype, or in float32 where that is narrower: float64 stays float64 throughout, so that an
alignment can be repeated in float64. Megatron's own cross-entropy narrows to float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabShard:
    """This rank's columns of the vocabulary: ``[start, start + width)``.

    allowed: bool ``[width]``, True on tokens that can be drawn; vocabulary padding never can, and neither can tokens
    that sampling excludes. All others have probability 0. ``None``: all columns are allowed.
    """

    start: int
    width: int
    allowed: torch.Tensor | None = None
    group: dist.ProcessGroup | None = None


def _all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


class _VocabParallelLogprobs(torch.autograd.Function):
    """log p(target) and H(p) of p = softmax(logits); gradients are local to the shard.

    With z the shifted logits and Z the sum of exp(z):
    log p_t = z_t - log Z, d log p_t / d z_j = 1[j = t] - p_j;
    H = log Z - sum_j p_j z_j, dH / dz_j = -p_j (z_j - log Z + H).
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if shard.allowed is not None:
            logits = logits.masked_fill(~shard.allowed, torch.finfo(logits.dtype).min)
        maximum = _all_reduce(logits.amax(dim=-1), dist.ReduceOp.MAX, shard.group)
        shifted = logits - maximum.unsqueeze(-1)
        exponentials = shifted.exp()
        if shard.allowed is not None:
            # 0 · anything finite is 0: excluded columns then add nothing to entropy or gradient.
            exponentials = exponentials.masked_fill(~shard.allowed, 0.0)
            shifted = shifted.masked_fill(~shard.allowed, 0.0)
        local_targets = targets - shard.start
        is_local = (local_targets >= 0) & (local_targets < shard.width)
        local_targets = torch.where(is_local, local_targets, 0)
        target_logits = shifted.gather(-1, local_targets.unsqueeze(-1)).squeeze(-1)
        sums = torch.stack(
            (
                exponentials.sum(dim=-1),
                torch.where(is_local, target_logits, torch.zeros_like(target_logits)),
                (exponentials * shifted).sum(dim=-1),
            )
        )
        total, target, weighted = _all_reduce(sums, dist.ReduceOp.SUM, shard.group)
        log_total = total.log()
        entropy = log_total - weighted / total
        probabilities = exponentials / total.unsqueeze(-1)
        ctx.save_for_backward(probabilities, shifted, log_total, entropy, local_targets, is_local)
        return target - log_total, entropy

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        probabilities, shifted, log_total, entropy, local_targets, is_local = ctx.saved_tensors
        log_p_plus_entropy = shifted - (log_total - entropy).unsqueeze(-1)
        grad = -probabilities * (grad_logprobs.unsqueeze(-1) + grad_entropy.unsqueeze(-1) * log_p_plus_entropy)
        # Each row has one target, so a plain scatter is enough; scatter_add_ has no deterministic form on CUDA.
        index = local_targets.unsqueeze(-1)
        hit = (grad_logprobs * is_local).unsqueeze(-1).to(grad.dtype)
        grad.scatter_(-1, index, grad.gather(-1, index) + hit)
        return grad, None, None


def vocab_parallel_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard, *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of its distribution, softmax(logits / temperature).

    logits: floating ``[B, T, V / tp]``, this rank's columns; targets: int64 ``[B, T]``, global token ids.
    Returns two ``[B, T]`` tensors, equal on all ranks of ``shard.group``, in the logits' dtype or float32 if that is
    wider. Every rank of the group must call it: one MAX and one SUM all-reduce forward, none backward.
    """
    widened = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprobs, entropy = _VocabParallelLogprobs.apply(widened, targets, shard)
    return logprobs, entropy
