"""Plans the order in which a layout adds; one process that follows the plan gives a candidate's values bit for bit.

Contract: importing this imports no torch. Two configurations that differ in their layout alone and have equal plans
compute the same bits in every trace and metric. Orders are of Megatron-core 0.16.1 with local layers, where a sum over
ranks adds their parts in the order of the ranks (``order.ordered_reductions``; two parts have one sum in any order).

Ranks are numbered by tp, cp, dp, pp, the first fastest, as Megatron does.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Literal

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.layouts.described import DescribedModel, DescribedRun, DescribedTraining
from mock_scheduler.layouts.layout import emulation_limits, ranks_of_replica

GemmClass = Literal["qkv", "proj", "fc1", "fc2", "output", "embedding"]
SplitAxis = Literal["output", "input", "none"]
ReductionName = Literal[
    "row_parallel_forward",
    "column_parallel_dgrad",
    "embedding_forward",
    "vocabulary_sums",
    "key_value_gradients",
    "data_parallel_gradients",
    "replicated_gradients",
    "tied_gradients",
    "expert_gradients",
    "gradient_norm",
]
AccumulatorName = Literal["split", "replicated", "query_key_norm", "embedding", "expert"]
RankAxis = Literal["tp", "cp", "dp", "pp", "expert_dp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmOrder:
    """A class of matrix products (the embedding's look-up is one of them) and how its weight is cut.

    split: the weight's output features, its input features, or nothing. parts: how many ranks have one each.
    interleave: blocks of the whole weight, with a part of each on every rank: 2 where up lies behind gate.
    token_parts: into how many the tokens of a line are cut, each with a product of its own.
    """

    name: GemmClass
    split: SplitAxis
    parts: int
    interleave: int = 1
    token_parts: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionOrder:
    """Holds a sum over ranks. ``axes``: of the ranks, the fastest first. ``size``: how many.

    ``order``: ``linear``: ((p_0 + p_1) + p_2) + ... by the rank in the group. ``dtype``: of the addition. ``scale``:
    the factor of each part before it.
    """

    name: ReductionName
    axes: tuple[RankAxis, ...]
    size: int
    dtype: str
    scale: float = 1.0
    order: Literal["linear"] = "linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class AccumulatorOrder:
    """The place where the gradient of a class of parameters is accumulated over micro-batches, and its later sums.

    ``virtual_ranks``: on each axis, how many ranks have an accumulator of their own for the same numbers. ``dtype``: of
    the accumulator. ``reductions``: names of ``ReductionOrder``, in this order; division by the number of tokens
    follows.
    """

    name: AccumulatorName
    virtual_ranks: dict[RankAxis, int]
    dtype: str
    reductions: tuple[ReductionName, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertOrder:
    """The ranks whose tokens an expert multiplies in one product, and the ranks with the expert.

    ``sources``: ranks whose tokens it sees in one product, one rank's after another's, expert parallelism's degree.
    ``lanes``: replicas of the model that compute together for it, each its own micro-batch. ``groups``: products of
    an expert while as many micro-batches are computed. ``replicas``: accumulators for it; its gradients are summed over
    them. ``is_apart``: whether experts have an optimizer and gradient buffers of their own.
    """

    sources: int
    lanes: int
    groups: int
    replicas: int
    is_apart: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class NormOrder:
    """The gradient's norm adds one rank's numbers in one go, by parameter or by a range of it.

    ``stages``, ``chunks``: the pipeline's, with parameters apart. ``parts``: tp's degree. ``shards``: ranks over which
    the distributed optimizer cuts its flat buffers; 1 without it.
    """

    stages: int
    chunks: int
    parts: int
    shards: int
    is_sharded: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderPlan:
    """Everything about a layout that changes a rounding; replica i mod dp computes micro-batch i.

    tp, cp, dp, stages, chunks: its degrees as far as they matter. sequence_parallel: norms see a tp-th of the tokens.
    micro_batch_multiple: the number of an update's micro-batches is a multiple of it, with empty ones to fill up.
    experts: ``None`` for a model without.
    """

    tp: int
    cp: int
    dp: int
    stages: int
    chunks: int
    sequence_parallel: bool
    micro_batch_multiple: int
    vocabulary_multiple: int
    gemms: tuple[GemmOrder, ...]
    reductions: tuple[ReductionOrder, ...]
    accumulators: tuple[AccumulatorOrder, ...]
    norm: NormOrder
    is_tied: bool
    experts: ExpertOrder | None

    @property
    def lanes(self) -> int:
        """Replicas that compute together, since an expert sees the tokens of all of them at once."""
        return 1 if self.experts is None else self.experts.lanes

    @property
    def rounds(self) -> int:
        """How often as many replicas as there are lanes compute, one lot after another."""
        return self.dp // self.lanes

    @property
    def shares(self) -> int:
        """Returns the number of parts of the tokens computed together, apart from sequence parallelism."""
        return self.lanes * self.cp

    @property
    def replicas(self) -> int:
        """Ranks over which gradients of one parameter's part are summed: cp × dp."""
        return self.cp * self.dp

    @property
    def gradient_scale(self) -> float:
        """Returns the factor of each replica's gradient before the sum over replicas."""
        return next((item.scale for item in self.reductions if item.name == "data_parallel_gradients"), 1.0)

    def to_json(self) -> str:
        """Returns the plan as JSON with sorted keys, equal for equal plans."""
        return json.dumps(asdict(self), sort_keys=True, indent=1)


def plan_order(config: DescribedRun, *, routers: Collection[str] = ("layout_invariant",)) -> OrderPlan:
    """Plans the layout that a run emulates, or else its own; routers: as for ``emulation_limits``.

    Raises:
        ValueError: the layout cannot be planned; says every reason of ``emulation_limits``.
    """
    layout = config.order.emulate or config.parallel
    model, training = config.model, config.training
    problems = emulation_limits(layout, model, training, routers=routers)
    if problems:
        raise ValueError(f"layout {layout.describe()} has no order plan: {'; '.join(problems)}")
    tp, cp, dp = layout.tensor_model_parallel_size, layout.context_parallel_size, layout.data_parallel_size
    pp, chunks = layout.pipeline_model_parallel_size, layout.num_chunks
    is_tied = not model.untie_embeddings_and_output_weights
    narrow, main = config.precision, _main_dtype(config.precision, training)
    reductions = _reductions(layout, training, is_tied=is_tied, has_norms=model.qk_layernorm, dtypes=(narrow, main))
    return OrderPlan(
        tp=tp,
        cp=cp,
        dp=dp,
        stages=pp,
        chunks=chunks,
        # Over one tp rank the sequence is whole, whatever the switch says.
        sequence_parallel=layout.sequence_parallel and tp > 1,
        # Interleaved chunks are scheduled in groups of pp micro-batches, so Megatron takes multiples only.
        micro_batch_multiple=dp * (pp if chunks > 1 else 1),
        vocabulary_multiple=model.make_vocab_size_divisible_by * tp,
        gemms=_gemms(model, tp=tp, cp=cp),
        reductions=reductions,
        accumulators=_accumulators(layout, is_tied=is_tied, main=main, known={item.name for item in reductions}),
        norm=NormOrder(
            stages=pp,
            chunks=chunks,
            parts=tp,
            shards=cp * dp if training.use_distributed_optimizer else 1,
            is_sharded=training.use_distributed_optimizer,
        ),
        is_tied=is_tied,
        experts=None if model.num_moe_experts is None else _experts(layout),
    )


def _experts(layout: ParallelConfig) -> ExpertOrder:
    # Expert parallelism takes ranks that follow one another, tp the fastest, then cp, then dp.
    ep, of_replica = layout.expert_model_parallel_size, ranks_of_replica(layout)
    # An expert group wider than a replica computes several replicas' micro-batches at once.
    lanes = max(1, ep // of_replica)
    return ExpertOrder(
        sources=ep,
        lanes=lanes,
        groups=lanes * of_replica // ep,
        replicas=of_replica * layout.data_parallel_size // ep,
        is_apart=ep > 1,
    )


def _main_dtype(precision: str, training: DescribedTraining) -> str:
    """Returns the dtype in which main gradients accumulate."""
    # Only bfloat16 is widened: float32 and float64 accumulate as they are.
    is_widened = precision == "bfloat16" and training.accumulate_allreduce_grads_in_fp32
    return "float32" if is_widened else precision


def _gemms(model: DescribedModel, *, tp: int, cp: int) -> tuple[GemmOrder, ...]:
    split: dict[GemmClass, SplitAxis] = {"qkv": "output", "proj": "input", "fc1": "output", "fc2": "input"}
    split |= {"output": "output", "embedding": "output"}
    return tuple(
        GemmOrder(
            name=name,
            split=axis if tp > 1 else "none",
            parts=tp,
            interleave=2 if name == "fc1" and model.swiglu and tp > 1 else 1,
            token_parts=cp,
        )
        for name, axis in split.items()
    )


def _reductions(
    layout: ParallelConfig, training: DescribedTraining, *, is_tied: bool, has_norms: bool, dtypes: tuple[str, str]
) -> tuple[ReductionOrder, ...]:
    """Lists every sum over more than one rank, in the order in which a step first makes it."""
    tp, cp, dp = layout.tensor_model_parallel_size, layout.context_parallel_size, layout.data_parallel_size
    pp = layout.pipeline_model_parallel_size
    narrow, main = dtypes
    expert_replicas = ranks_of_replica(layout) * dp // layout.expert_model_parallel_size
    has_apart = layout.expert_model_parallel_size > 1
    wide = "float64" if narrow == "float64" else "float32"
    # With a loss per token, one division by all tokens follows the sums; else each replica's mean is averaged.
    scale = 1.0 if training.calculate_per_token_loss else 1.0 / (cp * dp)
    # Whole parameters that see a tp-th of the tokens, or of the heads, have a part of their gradient on each rank.
    sums_replicated = (layout.sequence_parallel or has_norms) and tp > 1
    # With the distributed optimizer no data-parallel rank has a whole gradient, so squares are added over all.
    norm_axes: tuple[RankAxis, ...] = ("tp", "cp", "dp", "pp") if training.use_distributed_optimizer else ("tp", "pp")
    sizes: dict[RankAxis, int] = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    norm_size = 1
    for axis in norm_axes:
        norm_size *= sizes[axis]
    every = (
        *(
            ReductionOrder(name=name, axes=("tp",), size=tp, dtype=narrow)
            for name in ("embedding_forward", "row_parallel_forward", "column_parallel_dgrad")
        ),
        ReductionOrder(name="vocabulary_sums", axes=("tp",), size=tp, dtype=wide),
        # Keys and values are gathered over cp; backward, their gradients are added.
        ReductionOrder(name="key_value_gradients", axes=("cp",), size=cp, dtype=narrow),
        ReductionOrder(name="data_parallel_gradients", axes=("cp", "dp"), size=cp * dp, dtype=main, scale=scale),
        ReductionOrder(name="replicated_gradients", axes=("tp",), size=tp if sums_replicated else 1, dtype=main),
        ReductionOrder(name="tied_gradients", axes=("pp",), size=2 if is_tied and pp > 1 else 1, dtype=main),
        ReductionOrder(
            name="expert_gradients",
            axes=("expert_dp",),
            size=expert_replicas if has_apart else 1,
            dtype=main,
            scale=scale,
        ),
        ReductionOrder(name="gradient_norm", axes=norm_axes, size=norm_size, dtype=wide),
    )
    # A sum of one part rounds nothing, and must not make two plans differ.
    return tuple(item for item in every if item.size > 1)


def _accumulators(
    layout: ParallelConfig, *, is_tied: bool, main: str, known: set[ReductionName]
) -> tuple[AccumulatorOrder, ...]:
    tp, cp, dp = layout.tensor_model_parallel_size, layout.context_parallel_size, layout.data_parallel_size
    replicas: dict[RankAxis, int] = {"cp": cp, "dp": dp}
    data: tuple[ReductionName, ...] = ("data_parallel_gradients",)
    over_tp: tuple[ReductionName, ...] = (*data, "replicated_gradients")
    sequence = layout.sequence_parallel and tp > 1
    rows: list[tuple[AccumulatorName, dict[RankAxis, int]]] = [
        ("split", replicas),
        # Without sequence parallelism all tp ranks compute one and the same gradient: one accumulator stands for them.
        ("replicated", {"tp": tp if sequence else 1, **replicas}),
        ("query_key_norm", {"tp": tp, **replicas}),
        ("embedding", {**replicas, "pp": 2 if is_tied and layout.pipeline_model_parallel_size > 1 else 1}),
    ]
    # Megatron gives experts buffers and reductions of their own only then.
    if layout.expert_model_parallel_size > 1:
        rows.append(("expert", {"expert_dp": _experts(layout).replicas}))
    sums: dict[str, tuple[ReductionName, ...]] = {
        "split": data,
        "replicated": over_tp if sequence else data,
        "query_key_norm": over_tp,
        "embedding": (*data, "tied_gradients"),
        "expert": ("expert_gradients",),
    }
    return tuple(
        AccumulatorOrder(
            name=name,
            virtual_ranks=ranks,
            dtype=main,
            reductions=tuple(item for item in sums[name] if item in known),
        )
        for name, ranks in rows
    )
