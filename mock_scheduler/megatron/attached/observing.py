"""Reads a training's model and layout, and refuses what a trace would be wrong about."""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.errors import ConfigError, LayoutError
from mock_scheduler.megatron.followable import find_obstacles
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.support.text import bullet_list


def layout_of(model: ObservedModel) -> ParallelConfig:
    """The layout that a built model is in."""
    ranks = model.ranks
    # Without experts their degrees say nothing: Megatron's etp is tp where nobody sets it.
    has_experts = bool(model.config.num_moe_experts)
    return ParallelConfig(
        tensor_model_parallel_size=ranks.tp_size,
        pipeline_model_parallel_size=ranks.pp_size,
        virtual_pipeline_model_parallel_size=ranks.num_chunks if ranks.num_chunks > 1 else None,
        context_parallel_size=ranks.cp_size,
        expert_model_parallel_size=ranks.ep_size if has_experts else 1,
        expert_tensor_parallel_size=ranks.etp_size if has_experts else 1,
        data_parallel_size=ranks.dp_size,
        sequence_parallel=bool(model.config.sequence_parallel),
    )


def check_layout(found: ParallelConfig, asked: ParallelConfig | None) -> None:
    """Refuses a training in another layout than the run file's.

    Raises:
        LayoutError: with both.
    """
    if asked is not None and asked.describe() != found.describe():
        raise LayoutError(
            f"the training runs in layout {found.describe_in_full()}; expected {asked.describe_in_full()}, as the run "
            "file says. Check what the command makes of the layout's arguments"
        )


def check_followable(model: ObservedModel) -> None:
    """Refuses what attach cannot follow and whose trace would look right and be wrong.

    Raises:
        ConfigError: with every such feature.
    """
    problems = [text for is_on, text in _obstacles(model.config) if is_on]
    problems += find_obstacles(model)
    optimizer = model.optimizer
    if optimizer is not None and not isinstance(optimizer, MegatronOptimizer):
        problems.append(f"the optimizer is a {type(optimizer).__name__}; expected one of get_megatron_optimizer")
    if problems:
        raise ConfigError(f"attach cannot follow this training:{bullet_list(problems, limit=None)}")


def _obstacles(config: TransformerConfig) -> list[tuple[bool, str]]:
    # Keys of later releases are absent in older ones, which have no such feature.
    values = vars(config)
    return [
        (bool(values.get("fp8") and values.get("fp8_param")), "fp8 parameters: their values are not the tensors' own"),
        (bool(values.get("fp4") and values.get("fp4_param")), "fp4 parameters: their values are not the tensors' own"),
        (bool(values.get("fp16")), "fp16: gradients carry a loss scale that changes; use bf16 or float32"),
        (
            bool(values.get("enable_cuda_graph")),
            "CUDA graphs: a replayed graph calls no hooks; set enable_cuda_graph off",
        ),
        (bool(values.get("external_cuda_graph")), "CUDA graphs: a replayed graph calls no hooks; capture none"),
        (
            _has_graphs(values.get("cuda_graph_impl")),
            "CUDA graphs: a replayed graph calls no hooks; set cuda_graph_impl=none",
        ),
        (bool(values.get("is_hybrid_model")), "hybrid layers: their modules are in no table of observed modules"),
    ]


def _has_graphs(implementation: object) -> bool:
    return implementation not in (None, "none")
