"""Where this process stands among the ranks of a training on Megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from mock_scheduler.errors import LayoutError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRanks:
    """This process's rank and the size of each axis of the layout, and the device it computes on.

    ``num_chunks``: model chunks of each pipeline stage, more than one under the interleaved schedule.
    """

    global_rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    device: torch.device
    cp_rank: int = 0
    cp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1
    num_chunks: int = 1

    @property
    def is_first_stage(self) -> bool:
        """Whether this process holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this process holds the output layer, and so logits and losses."""
        return self.pp_rank == self.pp_size - 1

    @property
    def coordinates(self) -> dict[str, int]:
        """Rank on each axis, for messages and trace files; cp, ep and etp where the layout has them."""
        further = {
            "cp": (self.cp_rank, self.cp_size),
            "ep": (self.ep_rank, self.ep_size),
            "etp": (self.etp_rank, self.etp_size),
        }
        return {
            "tp": self.tp_rank,
            "pp": self.pp_rank,
            "dp": self.dp_rank,
            **{axis: rank for axis, (rank, size) in further.items() if size > 1},
        }


_AXES: Mapping[str, tuple[str, Callable[[], ProcessGroup | None]]] = {
    "tp": ("tp", partial(parallel_state.get_tensor_model_parallel_group, check_initialized=False)),
    "pp": ("pp", partial(parallel_state.get_pipeline_model_parallel_group, check_initialized=False)),
    "dp": ("dp", parallel_state.get_data_parallel_group),
    "cp": ("cp", partial(parallel_state.get_context_parallel_group, check_initialized=False)),
    "ep": ("ep", partial(parallel_state.get_expert_model_parallel_group, check_initialized=False)),
    "etp": ("expt_tp", partial(parallel_state.get_expert_tensor_parallel_group, check_initialized=False)),
}
"""By axis: its field in a model's ``ProcessGroupCollection``, and Megatron's global group of it."""

# A layout without these has them as groups of one process; a collection may leave the others out.
_NEEDED = ("tp", "pp", "dp")


def read_ranks(
    *,
    device: torch.device,
    num_chunks: int = 1,
    groups: ProcessGroupCollection | None = None,
    dp_group: ProcessGroup | None = None,
) -> ModelRanks:
    """Reads this process's place from a model's own process groups, and where they lack one from ``parallel_state``.

    The one place that knows both ways: releases before 0.16 have global groups alone, later ones hand groups over.

    Args:
        device: this process computes on it.
        num_chunks: model chunks of each pipeline stage.
        groups: the model's, as its ``pg_collection``.
        dp_group: data parallelism's where ``groups`` lack it, as ``DistributedDataParallel`` has it.

    Raises:
        LayoutError: a group of tp, pp or dp is in neither.
    """
    own = {} if groups is None else vars(groups)
    found = {axis: own.get(field) or _global_group(axis) for axis, (field, _) in _AXES.items()}
    found["dp"] = own.get("dp") or dp_group or found["dp"]
    missing = [axis for axis in _NEEDED if found[axis] is None]
    if missing:
        raise LayoutError(
            f"no process group of {', '.join(missing)}: the model's pg_collection lacks it, and Megatron's "
            "parallel_state is not initialized. Build the model with all of its groups, or call "
            "parallel_state.initialize_model_parallel before"
        )
    places: dict[str, int] = {}
    for axis, group in found.items():
        places[f"{axis}_rank"] = 0 if group is None else group.rank()
        places[f"{axis}_size"] = 1 if group is None else group.size()
    return ModelRanks(
        global_rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        num_chunks=num_chunks,
        **places,
    )


def _global_group(axis: str) -> ProcessGroup | None:
    return _AXES[axis][1]() if parallel_state.model_parallel_is_initialized() else None
