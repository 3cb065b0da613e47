"""Writes a checkpoint as releases before seals did: Megatron's distributed checkpoint, described by torch's pickles."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed import distributed_c10d

from pipelines.megatron.learner import Learner
from mock_scheduler.megatron.observed_model import unwrapped
from mock_scheduler.megatron.optimizer_state import ParameterState, count_updates, read_states
from pipelines.megatron.checkpoint import save_random_states
from pipelines.megatron.run_state import RunState
from pipelines.megatron.trained_model import TrainedModel

_SHARDED = (ShardedTensor, ShardedTensorFactory)


def save_old_checkpoint(folder: Path, learner: Learner, state: RunState) -> None:
    """Writes models, random states and ``run_state.json`` without seals. Every rank must call it."""
    if learner.runtime.is_writer:
        for name in learner.models:
            (folder / name).mkdir(parents=True)
    dist.barrier()
    # Ranks told each other of shards by objects then, which a run refuses today.
    with patch.object(distributed_c10d, "_unpickler", pickle.Unpickler):
        for name, model in learner.models.items():
            dist_checkpointing.save(_sharded_state(model), str(folder / name))
    save_random_states(folder / "random_states", learner.runtime, layout=learner.config.parallel.describe())
    dist.barrier()
    if learner.runtime.is_writer:
        write_old_run_state(folder, state)
    dist.barrier()


def write_old_run_state(folder: Path, state: RunState) -> None:
    """Writes the last file: sizes in place of seals."""
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "run_state.json"
    }
    content = {
        "next_step": state.next_step,
        "mode": state.mode,
        "fixed": dict(state.fixed),
        "scheduler": dict(state.scheduler),
        "learner": dict(state.learner),
        "files": files,
    }
    (folder / "run_state.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _sharded_state(model: TrainedModel) -> dict[str, Any]:
    chunks = {f"model{index}": unwrapped(chunk).sharded_state_dict() for index, chunk in enumerate(model.chunks)}
    states = _sharded_optimizer(chunks, read_states(model.observed))
    num_updates = count_updates(model.observed, device=model.runtime.device)
    further = {"optimizer": states, "num_updates": num_updates, "lr_schedule": model.lr_schedule.state_dict()}
    return {**chunks, **further}


def _sharded_optimizer(
    chunks: Mapping[str, Any], states: Mapping[torch.nn.Parameter, ParameterState]
) -> dict[str, dict[str, Any]]:
    sharded = {id(item.data): item for item in nested_values(chunks) if isinstance(item, _SHARDED)}
    return {
        str(index): {name: _like(sharded[id(parameter)], name, tensor) for name, tensor in state.items()}
        for index, (parameter, state) in enumerate(states.items())
    }


def _like(sharded: Any, name: str, tensor: torch.Tensor) -> Any:  # noqa: ANN401 - either of Megatron's two
    key = f"optimizer.state.{name}.{sharded.key}"
    if isinstance(sharded, ShardedTensor):
        return replace(sharded, key=key, data=tensor, dtype=tensor.dtype)
    return replace(sharded, key=key, data=tensor)
