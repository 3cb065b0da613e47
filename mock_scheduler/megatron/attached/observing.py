"""Reads the layout that a training runs in, and refuses another one than was asked for."""

from __future__ import annotations

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.errors import LayoutError
from mock_scheduler.megatron.observed_model import ObservedModel


def layout_of(model: ObservedModel) -> ParallelConfig:
    """The layout that a built model is in; ``observe_model`` gives one without experts no degrees of them."""
    ranks = model.ranks
    return ParallelConfig(
        tensor_model_parallel_size=ranks.tp_size,
        pipeline_model_parallel_size=ranks.pp_size,
        virtual_pipeline_model_parallel_size=ranks.num_chunks if ranks.num_chunks > 1 else None,
        context_parallel_size=ranks.cp_size,
        expert_model_parallel_size=ranks.ep_size,
        expert_tensor_parallel_size=ranks.etp_size,
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
