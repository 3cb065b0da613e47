"""Draws tokens from logits with numbers that are given, so that sampling is repeatable whatever the batch."""

from __future__ import annotations

import torch

from pipelines.config.environments import GeneratingArgs


def process_logits(logits: torch.Tensor, args: GeneratingArgs) -> torch.Tensor:
    """Log-probabilities of the distribution that is sampled, float64 ``[n, V]``; -inf where a token is cut off.

    logits: floating ``[n, V]``, whole vocabulary. Temperature first, then top-k, then top-p over what is left, which
    keeps the smallest set of most likely tokens whose probability reaches ``top_p`` (arXiv 1904.09751).
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
    """One token per row by inversion: the first whose cumulative probability exceeds the row's number.

    logits: floating ``[n, V]``; uniforms: float64 ``[n]`` in [0, 1). Returns tokens, int64 ``[n]``, and the
    log-probability with which each was drawn (of the processed distribution), float64 ``[n]``.
    """
    logprobs = process_logits(logits, args)
    cumulative = logprobs.exp().cumsum(dim=-1)
    last_possible = (logprobs > -torch.inf).long().cumsum(dim=-1).argmax(dim=-1)
    tokens = torch.searchsorted(cumulative, uniforms.unsqueeze(-1), right=True).squeeze(-1)
    tokens = torch.minimum(tokens, last_possible)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
