"""Checkpoints are written under one layout and read under any other.

Contract: ``{folder}/{model}`` holds Megatron's distributed checkpoint of each model under training: parameters and
buffers (the bias of experts among them), Adam's state of each parameter, the number of updates and the schedule.
``{folder}/random_states/rank_00000.safetensors`` holds the random states of one rank, torch's generators and Megatron's
tracker, one uint8 tensor each, with the layout in its metadata; no pickle. The tracker's states differ by tp, pp and ep
rank, and nothing in training draws from them (its randomness follows from seeds and names): they are set again under
the same layout only, and stay as seeded under another. ``run_state`` is written last: a folder without it is no
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from mock_scheduler.errors import ConfigError
from pipelines.megatron.learner import Learner
from pipelines.megatron.model import unwrapped
from pipelines.megatron.optimizer_state import (
    WIDE_COPY,
    ParameterState,
    count_updates,
    read_states,
    state_dtype,
    state_names,
    write_states,
)
from pipelines.megatron.perturbation import Perturbation
from pipelines.megatron.process.host_device import has_cuda
from pipelines.megatron.process.runtime import Runtime
from pipelines.megatron.run_state import RUN_STATE_FILE, RunState, write_run_state
from pipelines.megatron.trained_model import TrainedModel

_RANDOM_STATES = "random_states"

_SHARDED = (ShardedTensor, ShardedTensorFactory)
_Sharded = Any  # one of these, of Megatron's


def _sharded_chunks(model: TrainedModel) -> dict[str, Any]:
    return {f"model{index}": unwrapped(chunk).sharded_state_dict() for index, chunk in enumerate(model.chunks)}


def _sharded_states(
    chunks: Mapping[str, Any], states: Mapping[torch.nn.Parameter, ParameterState]
) -> dict[str, dict[str, _Sharded]]:
    """Adam's tensors, named and cut as the parameters that they belong to (``fully_reshardable`` in Megatron)."""
    sharded = {id(item.data): item for item in nested_values(chunks) if isinstance(item, _SHARDED)}
    return {
        str(index): {name: _like(sharded[id(parameter)], name, tensor) for name, tensor in state.items()}
        for index, (parameter, state) in enumerate(states.items())
    }


def _like(sharded: _Sharded, name: str, tensor: torch.Tensor) -> _Sharded:
    key = f"optimizer.state.{name}.{sharded.key}"
    if isinstance(sharded, ShardedTensor):
        return replace(sharded, key=key, data=tensor, dtype=tensor.dtype)
    return replace(sharded, key=key, data=tensor)


def save_checkpoint(folder: Path, learner: Learner, state: RunState) -> None:
    """Write a checkpoint: a folder per model. Every rank must call it.

    Raises:
        ConfigError: there is one in that folder already.
    """
    if (folder / RUN_STATE_FILE).exists():
        raise ConfigError(f"checkpoint {folder} exists already; choose another checkpoint_config.output_dir")
    runtime = learner.runtime
    dist.barrier()
    if runtime.is_writer:
        for name in (*learner.models, _RANDOM_STATES):
            (folder / name).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    for name, model in learner.models.items():
        _save_model(folder / name, model)
    save_random_states(folder / _RANDOM_STATES, runtime, layout=learner.config.parallel.describe())
    dist.barrier()
    if runtime.is_writer:
        write_run_state(folder, state)
    dist.barrier()


def _save_model(folder: Path, model: TrainedModel) -> None:
    chunks = _sharded_chunks(model)
    states = _sharded_states(chunks, read_states(model))
    num_updates = count_updates(model, device=model.runtime.device)
    further = {"optimizer": states, "num_updates": num_updates, "lr_schedule": model.lr_schedule.state_dict()}
    dist_checkpointing.save({**chunks, **further}, str(folder))


def load_checkpoint(folder: Path, learner: Learner, state: RunState) -> None:
    """Set models, optimizers and schedules from a checkpoint of any layout. Every rank must call it.

    Weights are moved as initial ones are, where the run has a perturbation.

    Raises:
        ConfigError: a model's files cannot be read, or hold another model.
    """
    perturbation = Perturbation.build(learner.config.perturbation)
    for name, model in learner.models.items():
        try:
            _load_model(folder / name, model, perturbation)
        except (CheckpointingException, CheckpointException) as error:
            raise ConfigError(
                f"resume_from_checkpoint: {folder / name} cannot be read, or is of another model: {error}\n"
                "Resume from another checkpoint."
            ) from error
    load_random_states(folder / _RANDOM_STATES, learner.runtime, layout=learner.config.parallel.describe())
    learner.load_state_dict(state.learner)


def _load_model(folder: Path, model: TrainedModel, perturbation: Perturbation | None) -> None:
    chunks = _sharded_chunks(model)
    parameters = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
    targets = {parameter: _empty_state(parameter) for parameter in parameters}
    loaded = dist_checkpointing.load({**chunks, "optimizer": _sharded_states(chunks, targets)}, str(folder))
    for index, chunk in enumerate(model.chunks):
        unwrapped(chunk).load_state_dict(loaded[f"model{index}"])
    states = {parameter: loaded["optimizer"][str(index)] for index, parameter in enumerate(parameters)}
    if perturbation is not None:
        _perturb(model, states, perturbation)
    write_states(model, states, num_updates=loaded["num_updates"])
    model.lr_schedule.num_steps = 0  # loading adds the stored number to it
    model.lr_schedule.load_state_dict(loaded["lr_schedule"])


@torch.no_grad()
def _perturb(
    model: TrainedModel, states: Mapping[torch.nn.Parameter, ParameterState], perturbation: Perturbation
) -> None:
    """Moves every parameter, and the wide copy in its state; the parameter stays the rounded copy."""
    for local in model.parameters():
        parameter, state = local.parameter, states[local.parameter]
        wide = state.get(WIDE_COPY, parameter)
        wide.copy_(perturbation.of_weight(wide, local.spec, parameter.dtype))
        parameter.copy_(wide)


def _empty_state(parameter: torch.nn.Parameter) -> ParameterState:
    dtype = state_dtype(parameter)
    return {name: torch.empty_like(parameter, dtype=dtype).detach() for name in state_names(parameter)}


_TRACKER = "tracker."


def _path(folder: Path, runtime: Runtime) -> Path:
    return folder / f"rank_{runtime.global_rank:05d}.safetensors"


def save_random_states(folder: Path, runtime: Runtime, *, layout: str) -> None:
    """Writes this rank's states into an existing folder. Does not communicate."""
    states = {"cpu": torch.get_rng_state()}
    if has_cuda():
        states["cuda"] = torch.cuda.get_rng_state()
    states |= {f"{_TRACKER}{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    # Copies: on the host the tracker's first state and torch's are one tensor, which the format refuses.
    copies = {name: state.detach().to("cpu", copy=True).contiguous() for name, state in states.items()}
    save_file(copies, _path(folder, runtime), metadata={"layout": layout})


def load_random_states(folder: Path, runtime: Runtime, *, layout: str) -> bool:
    """Sets this rank's states where they were saved in the same layout; returns whether they were. Does not
    communicate.
    """
    path = _path(folder, runtime)
    if not path.is_file():
        return False
    with safe_open(path, framework="pt") as file:
        if file.metadata()["layout"] != layout:
            return False
        states = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file, not a mapping
    torch.set_rng_state(states["cpu"])
    if has_cuda() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    tracked = {name.removeprefix(_TRACKER): state for name, state in states.items() if name.startswith(_TRACKER)}
    get_cuda_rng_tracker().set_states(tracked)
    return True
