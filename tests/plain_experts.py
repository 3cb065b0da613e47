"""A layer with experts in plain torch, token by token and row by row: what Megatron's layers are compared with.

Weights by Megatron's names, experts by their number in the model, all of one dtype and without any split:
``router.weight``, ``experts.local_experts.{E}.linear_fc1.weight``, ``shared_experts.linear_fc1.weight`` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pipelines.config.model import ModelConfig

Weights = Mapping[str, torch.Tensor]


def weight_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of every weight of one layer with gated experts, by name."""
    shapes: dict[str, tuple[int, ...]] = {"router.weight": (model.num_moe_experts or 0, model.hidden_size)}
    sizes = {f"experts.local_experts.{expert}": model.expert_ffn_size for expert in range(model.num_moe_experts or 0)}
    if model.moe_shared_expert_intermediate_size is not None:
        sizes["shared_experts"] = model.moe_shared_expert_intermediate_size
    for prefix, size in sizes.items():
        shapes[f"{prefix}.linear_fc1.weight"] = (2 * size, model.hidden_size)
        shapes[f"{prefix}.linear_fc2.weight"] = (model.hidden_size, size)
    return shapes


def choose(
    model: ModelConfig, logits: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight of each expert, ``[T, E]``, and the choice, bool ``[T, E]``; the highest scores by sorting."""
    weights, chosen = [], torch.zeros(logits.shape, dtype=torch.bool)
    for token, row in enumerate(logits):
        scores = torch.exp(row) / torch.exp(row).sum() if is_softmax(model) else 1.0 / (1.0 + torch.exp(-row))
        biased = (scores if bias is None else scores + bias).tolist()
        order = sorted(range(len(row)), key=[-score for score in biased].__getitem__)
        best = order[: model.moe_router_topk]
        chosen[token, best] = True
        needs_norm = model.moe_router_topk > 1 if not is_softmax(model) else not model.moe_router_pre_softmax
        total = sum(scores[expert] for expert in best) if needs_norm else 1.0
        factor = (model.moe_router_topk_scaling_factor or 1.0) / total
        weights.append(torch.stack([scores[e] * factor if e in best else row.new_zeros(()) for e in range(len(row))]))
    return torch.stack(weights), chosen


def is_softmax(model: ModelConfig) -> bool:
    return model.moe_router_score_function == "softmax"


def balance_of_tokens(model: ModelConfig, logits: torch.Tensor) -> torch.Tensor:
    """E / (K · N²) · sum over experts of (tokens that have it among their best) · (sum of scores), of N tokens."""
    normalised = logits.softmax(dim=-1) if is_softmax(model) else logits.sigmoid() / logits.sigmoid().sum(-1, True)
    _, chosen = choose(model.model_copy(update={"moe_router_topk_scaling_factor": None}), logits)
    per_expert = [chosen[:, e].sum() * normalised[:, e].sum() for e in range(logits.shape[1])]
    return torch.stack(per_expert).sum() * logits.shape[1] / (model.moe_router_topk * len(logits) ** 2)


def router_losses(
    model: ModelConfig, logits: torch.Tensor, rows: Sequence[int], row_weights: Mapping[int, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Load balancing loss and z-loss of one micro-batch, weighted by ``row_weights``, without coefficients."""
    present = sorted({row for row in rows if row >= 0})
    own = {row: logits[[token for token, of in enumerate(rows) if of == row]] for row in present}
    z = sum((row_weights[row] * own[row].logsumexp(-1).square().mean() for row in present), logits.new_zeros(()))
    if model.moe_router_load_balancing_type == "seq_aux_loss":
        parts = (row_weights[row] * balance_of_tokens(model, own[row]) for row in present)
        balance = sum(parts, logits.new_zeros(()))
    elif model.moe_router_load_balancing_type == "aux_loss":
        weight = sum(row_weights[row] for row in present)
        balance = weight * balance_of_tokens(model, torch.cat([own[row] for row in present]))
    else:
        balance = logits.new_zeros(())
    return balance, z


def mlp(weights: Weights, prefix: str, hidden: torch.Tensor) -> torch.Tensor:
    gate, up = (hidden @ weights[f"{prefix}.linear_fc1.weight"].T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ weights[f"{prefix}.linear_fc2.weight"].T


def layer_output(model: ModelConfig, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """The layer's output for tokens ``[T, h]``: every expert on every token, weighted, and the shared expert."""
    probs, _ = choose(model, hidden @ weights["router.weight"].T)
    output = torch.zeros_like(hidden)
    for expert in range(probs.shape[1]):
        output = output + probs[:, expert : expert + 1] * mlp(weights, f"experts.local_experts.{expert}", hidden)
    if model.moe_shared_expert_intermediate_size is not None:
        output = output + mlp(weights, "shared_experts", hidden)
    return output
