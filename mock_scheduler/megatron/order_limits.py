"""Some layouts' orders cannot be followed by one process, with some models and options (docs/layouts.md)."""

from __future__ import annotations

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.megatron.described import DescribedModel, DescribedTraining


def ranks_of_replica(layout: ParallelConfig) -> int:
    """Ranks of a pipeline stage that compute one micro-batch."""
    return layout.tensor_model_parallel_size * layout.context_parallel_size


def limits(layout: ParallelConfig, model: DescribedModel, training: DescribedTraining) -> tuple[str, ...]:
    """Says why one process cannot follow this layout's order with this model; empty where it can."""
    problems = [] if model.num_moe_experts is None else _expert_limits(layout, model, training)
    if model.transformer_impl != "local":
        problems.append(
            f"model.transformer_impl {model.transformer_impl}: only local layers' products and sums can be cut one by "
            "one; set it to local"
        )
    if training.overlap_grad_reduce or training.overlap_param_gather:
        problems.append(
            "training.overlap_grad_reduce, overlap_param_gather: they cut the buffers of gradients into other buckets; "
            "set both to false"
        )
    if layout.context_parallel_size > 1 and not training.calculate_per_token_loss:
        problems.append(
            "context_parallel_size above 1 with training.calculate_per_token_loss false: each rank divides by its own "
            "tokens, which is another loss (docs/layouts.md, loss-tuple-under-cp)"
        )
    return tuple(problems)


def _expert_limits(layout: ParallelConfig, model: DescribedModel, training: DescribedTraining) -> list[str]:
    """Says why the order of experts cannot be followed."""
    problems = []
    ep, of_replica = layout.expert_model_parallel_size, ranks_of_replica(layout)
    if model.moe_router_impl != "layout_invariant":
        problems.append(
            f"model.moe_router_impl {model.moe_router_impl}: its losses are those of the tokens that a rank happens to "
            "hold; set it to layout_invariant"
        )
    if model.add_bias_linear:
        problems.append("model.add_bias_linear with experts: how their biases add is not followed; set it to false")
    if layout.expert_tensor_parallel_size > 1:
        problems.append(
            f"expert_tensor_parallel_size {layout.expert_tensor_parallel_size}: products of parts of an expert are not "
            "followed; set it to 1"
        )
    if layout.tensor_model_parallel_size > 1 and ep == 1:
        problems.append(
            "experts with tensor_model_parallel_size above 1 and expert_model_parallel_size 1: their gradients are "
            "known to be wrong (docs/layouts.md, experts-under-tp)"
        )
    if ep % of_replica and of_replica % ep:
        problems.append(
            f"expert_model_parallel_size {ep} is neither a multiple nor a divisor of the {of_replica} ranks that "
            "compute one micro-batch: experts would see parts of several; set it to one of these"
        )
    elif ep > of_replica:
        problems += _lane_limits(training)
    return problems


def _lane_limits(training: DescribedTraining) -> list[str]:
    """Says why replicas cannot compute together, as they must where experts see the tokens of several."""
    where = "expert_model_parallel_size above tensor_model_parallel_size × context_parallel_size"
    problems = []
    if training.has_token_budget:
        problems.append(
            f"{where} with max_tokens_per_micro_batch: replicas computed together need micro-batches of one shape; set "
            "training.batching to fixed and sequence_packing to false"
        )
    if not training.calculate_per_token_loss:
        problems.append(
            f"{where} with training.calculate_per_token_loss false: each of the replicas computed together divides by "
            "its own tokens; set it to true"
        )
    return problems
