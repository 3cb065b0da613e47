"""Where this process stands among the ranks of a training on Megatron-core."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state


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


def read_ranks(*, device: torch.device, num_chunks: int = 1) -> ModelRanks:
    """Reads this process's place from Megatron's global groups (``parallel_state``), which must be there."""
    return ModelRanks(
        global_rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        device=device,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        num_chunks=num_chunks,
    )
