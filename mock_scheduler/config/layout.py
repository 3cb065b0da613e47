"""The ``parallel`` section, whose degrees are named as in Megatron's arguments, and a layout's rules; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from mock_scheduler.config.base import ConfigSection, PositiveInt
from mock_scheduler.config.model import ModelConfig
from mock_scheduler.text import bullet_list


class ParallelConfig(ConfigSection):
    """The layout: tp × pp × cp × dp processes, with experts over ep of the cp × dp (and tp) that are not pipeline.

    ``virtual_pipeline_model_parallel_size``: model chunks per stage, run by the interleaved schedule.
    ``overlap_p2p_comm``: how the interleaved schedule sends between stages; false is Megatron's default, batched.
    ``allow_known_wrong``: names of rules by which the installed Megatron computes wrong values (``docs/layouts.md``);
    a run that breaks one of these goes on with a warning, to show or to study it.
    """

    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    context_parallel_size: PositiveInt = 1
    expert_model_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False
    overlap_p2p_comm: bool = True
    allow_known_wrong: list[str] = Field(default=[])

    @property
    def num_chunks(self) -> int:
        """Model chunks per pipeline stage."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def world_size(self) -> int:
        """Number of processes that this layout needs."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
        )

    def describe(self) -> str:
        """One phrase for logs and messages: ``tp2 pp1 dp1 sp``; other degrees where they are not 1."""
        further = {
            "vpp": self.num_chunks,
            "cp": self.context_parallel_size,
            "ep": self.expert_model_parallel_size,
            "etp": self.expert_tensor_parallel_size,
        }
        parts = [
            f"tp{self.tensor_model_parallel_size}",
            f"pp{self.pipeline_model_parallel_size}",
            *(f"{axis}{size}" for axis, size in further.items() if size > 1),
            f"dp{self.data_parallel_size}",
        ]
        return " ".join([*parts, "sp"] if self.sequence_parallel else parts)

    def describe_degrees(self) -> str:
        """Every degree with its key's value, 1 included, for messages about a layout that cannot be run."""
        degrees = {
            "tp": self.tensor_model_parallel_size,
            "pp": self.pipeline_model_parallel_size,
            "vpp": self.num_chunks,
            "cp": self.context_parallel_size,
            "ep": self.expert_model_parallel_size,
            "etp": self.expert_tensor_parallel_size,
            "dp": self.data_parallel_size,
        }
        text = " ".join(f"{axis} {size}," for axis, size in degrees.items())
        return f"{text} sequence parallelism {'on' if self.sequence_parallel else 'off'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a layout's rules look at besides the layout.

    ``num_micro_batches``: of one update, over all data-parallel ranks; ``None`` where it follows from the data.
    """

    model: ModelConfig
    num_micro_batches: int | None
    sequence_multiple_of: int


def layout_problems(parallel: ParallelConfig, work: Workload) -> list[str]:
    """Every rule of Megatron-core that the layout breaks for this model and batch; empty where it can run."""
    return [*_division_problems(parallel, work), *_sequence_problems(parallel, work), *_expert_problems(parallel, work)]


def _division_problems(parallel: ParallelConfig, work: Workload) -> list[str]:
    model, tp, pp = work.model, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    chunks = pp * parallel.num_chunks
    axis = "pipeline_model_parallel_size"
    if parallel.num_chunks > 1:
        axis = f"pipeline_model_parallel_size {pp} × virtual_pipeline_model_parallel_size {parallel.num_chunks} ="
    divisions = [
        ("model.num_attention_heads", model.num_attention_heads, "tensor_model_parallel_size", tp),
        ("model.num_query_groups", model.query_groups, "tensor_model_parallel_size", tp),
        ("model.ffn_hidden_size", model.ffn_size, "tensor_model_parallel_size", tp),
        ("model.num_layers", model.num_layers, axis, chunks),
    ]
    if work.num_micro_batches is not None:
        count, dp = work.num_micro_batches, parallel.data_parallel_size
        divisions.append(("micro-batches per update", count, "data_parallel_size", dp))
        if parallel.num_chunks > 1 and count % dp == 0:
            name = "micro-batches per update and data-parallel rank"
            divisions.append((name, count // dp, "pipeline_model_parallel_size", pp))
    if model.moe_shared_expert_intermediate_size is not None:
        size = model.moe_shared_expert_intermediate_size
        divisions.append(("model.moe_shared_expert_intermediate_size", size, "tensor_model_parallel_size", tp))
    problems = [
        f"{name} {value} is not a multiple of {axis} {size}" for name, value, axis, size in divisions if value % size
    ]
    if parallel.num_chunks > 1 and pp == 1:
        problems.append(
            f"virtual_pipeline_model_parallel_size {parallel.num_chunks} needs pipeline_model_parallel_size > 1"
        )
    return problems


def _sequence_problems(parallel: ParallelConfig, work: Workload) -> list[str]:
    tp, cp, multiple = parallel.tensor_model_parallel_size, parallel.context_parallel_size, work.sequence_multiple_of
    problems = []
    if parallel.sequence_parallel and tp == 1:
        problems.append("sequence_parallel needs tensor_model_parallel_size > 1")
    factors = {}
    if parallel.sequence_parallel and tp > 1:
        factors[f"tensor_model_parallel_size {tp}"] = (tp, "sequence_parallel")
    if cp > 1:
        factors[f"2 × context_parallel_size {cp}"] = (2 * cp, "context parallelism")
    needed = 1
    for factor, _ in factors.values():
        needed *= factor
    if multiple % needed:
        reasons = " and ".join(reason for _, reason in factors.values())
        verb = "needs" if len(factors) == 1 else "need"
        problems.append(
            f"training.sequence_multiple_of {multiple} is not a multiple of {' × '.join(factors)}, as {reasons} {verb}"
        )
    return problems


def _expert_problems(parallel: ParallelConfig, work: Workload) -> list[str]:
    model, tp, ep = work.model, parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size
    if model.num_moe_experts is None:
        return [
            f"{name} {size} needs experts: model.num_moe_experts is not set"
            for name, size in (("expert_model_parallel_size", ep), ("expert_tensor_parallel_size", etp))
            if size > 1
        ]
    problems = []
    if model.num_moe_experts % ep:
        problems.append(
            f"model.num_moe_experts {model.num_moe_experts} is not a multiple of expert_model_parallel_size {ep}"
        )
    ranks = tp * parallel.context_parallel_size * parallel.data_parallel_size
    if ranks % (ep * etp):
        problems.append(
            f"the {ranks} ranks of a pipeline stage (tensor_model_parallel_size {tp} × context_parallel_size "
            f"{parallel.context_parallel_size} × data_parallel_size {parallel.data_parallel_size}) are not a multiple "
            f"of expert_model_parallel_size {ep} × expert_tensor_parallel_size {etp}"
        )
    if model.expert_ffn_size % etp:
        problems.append(
            f"model.moe_ffn_hidden_size {model.expert_ffn_size} is not a multiple of expert_tensor_parallel_size {etp}"
        )
    if tp > 1 and not parallel.sequence_parallel:
        problems.append(
            f"experts with tensor_model_parallel_size {tp} need sequence_parallel: without it every rank routes every "
            "token"
        )
    return problems


def describe_layout_problems(parallel: ParallelConfig, problems: list[str]) -> str:
    """The refusal of a layout: its degrees, the processes it needs and every rule that it breaks."""
    return (
        f"layout {parallel.describe()} ({parallel.world_size} processes: {parallel.describe_degrees()}) cannot be run:"
        f"{bullet_list(problems, limit=None)}"
    )
