"""A layout runs a model and its batches if it keeps Megatron-core's rules, and can be emulated within some limits.

Contract: imports no torch. Megatron-core 0.16.1 and 0.19.2 assert the rules, mostly after process groups are made; here
they are checked before a process starts. ``docs/layouts.md`` lists them, rules that depend on the device, and the
limits of emulation, in which one process follows the layout's order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.layouts.described import DescribedModel, DescribedTraining
from mock_scheduler.support.text import bullet_list


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Holds the facts for a layout's rules, besides the layout.

    ``num_micro_batches``: of one update, over all data-parallel ranks; ``None`` where it follows from the data.
    ``averages_micro_batches``: whether the loss is a mean over micro-batches, not over tokens.
    ``layers_per_recomputation``: layers recomputed together by the uniform method; 1 without recomputation.
    ``layers_of_block_recomputation``: recomputed layers of each stage or chunk by the block method; 0 without it.
    """

    model: DescribedModel
    num_micro_batches: int | None
    sequence_multiple_of: int
    averages_micro_batches: bool = False
    layers_per_recomputation: int = 1
    layers_of_block_recomputation: int = 0


def layout_problems(parallel: ParallelConfig, work: Workload) -> list[str]:
    """Returns every rule by which the layout cannot run this model and batch; empty where it can.

    One rule is stricter than Megatron-core's: a tensor-parallel rank holds whole query groups, never a part of one.
    """
    return [
        *_tensor_problems(parallel, work.model),
        *_pipeline_problems(parallel, work),
        *_batch_problems(parallel, work),
        *_sequence_problems(parallel, work),
        *_expert_problems(parallel, work.model),
    ]


_Division = tuple[str, int, str, int]
"""The divided thing and its size, the dividing axis and its size."""


def _remainders(*divisions: _Division) -> list[str]:
    return [
        f"{name} {value} is not a multiple of {axis} {size}" for name, value, axis, size in divisions if value % size
    ]


def _tensor_problems(parallel: ParallelConfig, model: DescribedModel) -> list[str]:
    axis, tp = "tensor_model_parallel_size", parallel.tensor_model_parallel_size
    divisions: list[_Division] = [
        ("model.num_attention_heads", model.num_attention_heads, axis, tp),
        ("model.num_query_groups", model.query_groups, axis, tp),
    ]
    if not all(model.moe_layers):
        divisions.append(("model.ffn_hidden_size", model.ffn_size, axis, tp))
    if model.moe_shared_expert_intermediate_size is not None:
        size = model.moe_shared_expert_intermediate_size
        divisions.append(("model.moe_shared_expert_intermediate_size", size, axis, tp))
    return _remainders(*divisions)


def _pipeline_problems(parallel: ParallelConfig, work: Workload) -> list[str]:
    pp, num_chunks, num_layers = parallel.pipeline_model_parallel_size, parallel.num_chunks, work.model.num_layers
    axis = "pipeline_model_parallel_size"
    if num_chunks > 1:
        axis = f"pipeline_model_parallel_size {pp} × virtual_pipeline_model_parallel_size {num_chunks} ="
    problems = _remainders(("model.num_layers", num_layers, axis, pp * num_chunks))
    if parallel.virtual_pipeline_model_parallel_size == 1:
        problems.append("virtual_pipeline_model_parallel_size 1 would have no effect; leave it out, or set it above 1")
    if num_chunks > 1 and pp == 1:
        problems.append(f"virtual_pipeline_model_parallel_size {num_chunks} needs pipeline_model_parallel_size > 1")
    if not problems:
        place = "model chunk" if num_chunks > 1 else "pipeline stage"
        problems = _recomputation_problems(work, place=place, layers=num_layers // (pp * num_chunks))
    return problems


def _recomputation_problems(work: Workload, *, place: str, layers: int) -> list[str]:
    together, block = work.layers_per_recomputation, work.layers_of_block_recomputation
    problems = []
    if layers % together:
        problems.append(
            f"the {layers} layers of a {place} are not a multiple of training.recompute_num_layers {together}, as "
            "recompute_method uniform needs"
        )
    if block > layers:
        problems.append(
            f"training.recompute_num_layers {block} is larger than the {layers} layers of a {place}, of which "
            f"recompute_method block takes the first ones; set it to at most {layers}"
        )
    return problems


def _batch_problems(parallel: ParallelConfig, work: Workload) -> list[str]:
    count, dp = work.num_micro_batches, parallel.data_parallel_size
    if count is None:
        return _filling_problems(parallel, work)
    problems = _remainders(("micro-batches per update", count, "data_parallel_size", dp))
    if parallel.num_chunks > 1 and not problems:
        name = "micro-batches per update and data-parallel rank"
        problems = _remainders(
            (name, count // dp, "pipeline_model_parallel_size", parallel.pipeline_model_parallel_size)
        )
    return problems


def _filling_problems(parallel: ParallelConfig, work: Workload) -> list[str]:
    """Lists broken rules of an update with empty micro-batches: they fill it up, since the data decides the number.

    In a mean over micro-batches they would count, and Megatron's own router cannot take them.
    """
    axes = {
        "data_parallel_size": parallel.data_parallel_size,
        "virtual_pipeline_model_parallel_size": parallel.num_chunks,
    }
    splits = [f"{axis} {size}" for axis, size in axes.items() if size > 1]
    if not splits:
        return []
    needs, model, problems = " and ".join(splits), work.model, []
    fixed = (
        "or fix the number of micro-batches (training.batching fixed without sequence_packing, rollout_form trajectory)"
    )
    if work.averages_micro_batches:
        problems.append(
            f"training.calculate_per_token_loss false is a mean over micro-batches, and with {needs} an update is "
            f"filled up with empty ones, which would count; set it to true, {fixed}"
        )
    if model.num_moe_experts is not None and model.moe_router_impl == "megatron":
        problems.append(
            f"model.moe_router_impl megatron with model.num_moe_experts {model.num_moe_experts}: with {needs} an "
            "update is filled up with empty micro-batches, for which Megatron's own router divides by 0 or counts "
            f"padding; set model.moe_router_impl to layout_invariant, {fixed}"
        )
    return problems


def _sequence_problems(parallel: ParallelConfig, work: Workload) -> list[str]:
    """Lists broken rules of the length of rows."""
    # Context parallelism cuts a row into 2 · cp parts and gives two to each rank; sequence parallelism cuts the two
    # together into tp parts.
    tp, cp, multiple = parallel.tensor_model_parallel_size, parallel.context_parallel_size, work.sequence_multiple_of
    is_sequence_parallel = parallel.sequence_parallel and tp > 1
    problems = []
    if parallel.sequence_parallel and tp == 1:
        problems.append("sequence_parallel needs tensor_model_parallel_size > 1")
    if cp > 1 and is_sequence_parallel:
        needed = cp * math.lcm(2, tp)
        reason = (
            f"{needed}, as context_parallel_size {cp} and sequence_parallel over tensor_model_parallel_size {tp} need"
        )
    elif cp > 1:
        needed, reason = 2 * cp, f"2 × context_parallel_size {cp}, as context parallelism needs"
    else:
        needed = tp if is_sequence_parallel else 1
        reason = f"tensor_model_parallel_size {tp}, as sequence_parallel needs"
    if multiple % needed:
        problems.append(f"training.sequence_multiple_of {multiple} is not a multiple of {reason}")
    if cp > 1 and work.model.transformer_impl == "transformer_engine":
        problems.append(
            f"context_parallel_size {cp} with model.transformer_impl transformer_engine is not supported here yet: "
            "masks and packed lines are described to each rank as the local layers take them; set "
            "model.transformer_impl to local, or context_parallel_size to 1"
        )
    return problems


def _expert_problems(parallel: ParallelConfig, model: DescribedModel) -> list[str]:
    tp, cp, dp = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.data_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    if model.num_moe_experts is None:
        return [
            f"{name} {size} needs experts: model.num_moe_experts is not set"
            for name, size in (("expert_model_parallel_size", ep), ("expert_tensor_parallel_size", etp))
            if size > 1
        ]
    problems = _remainders(
        ("model.num_moe_experts", model.num_moe_experts, "expert_model_parallel_size", ep),
        ("model.moe_ffn_hidden_size", model.expert_ffn_size, "expert_tensor_parallel_size", etp),
    )
    ranks = tp * cp * dp
    if ranks % (ep * etp):
        problems.append(
            f"the {ranks} ranks of a pipeline stage (tensor_model_parallel_size {tp} × context_parallel_size {cp} × "
            f"data_parallel_size {dp}) are not a multiple of expert_model_parallel_size {ep} × "
            f"expert_tensor_parallel_size {etp}"
        )
    if model.add_bias_linear and etp > 1:
        problems.append(f"experts with biases (model.add_bias_linear) need expert_tensor_parallel_size 1, found {etp}")
    if tp > 1 and not parallel.sequence_parallel:
        problems.append(
            f"experts with tensor_model_parallel_size {tp} need sequence_parallel: without it every rank routes every "
            "token"
        )
    return problems


def describe_layout_problems(parallel: ParallelConfig, problems: list[str]) -> str:
    """Writes the refusal of a layout: its degrees, its processes and every broken rule."""
    return f"layout {parallel.describe_in_full()} cannot be run:{bullet_list(problems, limit=None)}"


def ranks_of_replica(layout: ParallelConfig) -> int:
    """Counts the ranks of a pipeline stage that compute one micro-batch."""
    return layout.tensor_model_parallel_size * layout.context_parallel_size


def emulation_limits(
    layout: ParallelConfig,
    model: DescribedModel,
    training: DescribedTraining,
    *,
    routers: Collection[str] = ("layout_invariant",),
) -> tuple[str, ...]:
    """Says why one process cannot follow this layout's order with this model; empty where it can.

    routers: the values of ``moe_router_impl`` that the process follows.
    """
    problems = [] if model.num_moe_experts is None else _expert_limits(layout, model, training, routers)
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


def _expert_limits(
    layout: ParallelConfig, model: DescribedModel, training: DescribedTraining, routers: Collection[str]
) -> list[str]:
    """Says why the order of experts cannot be followed."""
    problems = []
    ep, of_replica = layout.expert_model_parallel_size, ranks_of_replica(layout)
    if model.moe_router_impl not in routers:
        problems.append(
            f"model.moe_router_impl {model.moe_router_impl}: its losses are those of the tokens that a rank happens to "
            "hold; set it to layout_invariant"
        )
    if model.add_bias_linear:
        problems.append("model.add_bias_linear with experts: how their biases add is not followed; set it to false")
    if model.moe_shared_expert_gate:
        problems.append("model.moe_shared_expert_gate true: how the parts of the gate's products add is not followed")
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
