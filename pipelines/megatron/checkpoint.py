"""Distributed checkpoints: written under one layout, read under any other.

Contract: ``{folder}/{model}`` holds Megatron's distributed checkpoint of each model under training (parameters,
optimizer, schedule), and ``{folder}/run_state.json`` step, seed, mode, model, precision, kind of optimizer and the
states of rollout scheduler and learner. It is written last: a folder without it is not a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mock_scheduler.config.schema import PipelineConfig
from mock_scheduler.digests import JSON
from mock_scheduler.errors import ConfigError
from mock_scheduler.files import load_json_object, save_json
from mock_scheduler.text import bullet_list
from pipelines.megatron.model import unwrapped
from pipelines.learner import Learner
from pipelines.megatron.trained_model import TrainedModel

RUN_STATE_FILE = "run_state.json"

# Gathers the optimizer's buffers into tensors of the parameters' own shapes, which any layout can read
# (DistributedOptimizer.sharded_state_dict, megatron-core 0.16.1 and 0.19.2).
_RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Where a run stands: ``next_step`` is the first step that has not been trained.

    ``fixed``: what a run that goes on from here must have alike, by the configuration's dotted names.
    """

    next_step: int
    mode: str
    fixed: Mapping[str, JSON]
    scheduler: Mapping[str, JSON]
    learner: Mapping[str, JSON]


def fixed_settings(config: PipelineConfig, *, vocab_size: int) -> dict[str, JSON]:
    """The settings that a checkpoint's tensors, and the run's seeded parts, depend on.

    ``vocab_size``: the one in effect, which follows from the environments where the model section has none.
    """
    model = {**config.model.model_dump(mode="json"), "vocab_size": vocab_size}
    return {
        "seed": config.seed,
        "precision": config.precision,
        "training.use_distributed_optimizer": config.training.use_distributed_optimizer,
        **{f"model.{name}": value for name, value in model.items()},
    }


def check_same_settings(folder: Path, state: RunState, current: Mapping[str, JSON]) -> None:
    """Raise ConfigError that lists each setting which is not as it was when the checkpoint was written."""
    names = dict.fromkeys([*current, *state.fixed])
    differing = [
        f"{name}: the checkpoint has {_shown(state.fixed, name)}, this run has {_shown(current, name)}"
        for name in names
        if _shown(state.fixed, name) != _shown(current, name)
    ]
    if differing:
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is of a run with other settings, which its tensors, reference policy, "
            f"environments or samples follow from:{bullet_list(differing, limit=None)}\n"
            "Set them as they were, or start a new run."
        )


def _shown(settings: Mapping[str, JSON], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "none"


def checkpoint_folder(root: Path, next_step: int) -> Path:
    """The folder of the checkpoint from which ``next_step`` would be run."""
    return root / f"step_{next_step:06d}"


def _sharded_state(model: TrainedModel, *, is_loading: bool) -> dict[str, Any]:
    chunks = {_chunk_key(model, index): unwrapped(chunk) for index, chunk in enumerate(model.chunks)}
    model_state = {key: chunk.sharded_state_dict() for key, chunk in chunks.items()}
    # The optimizer finds its parameters in the state of one chunk, or of all by ``model0``, ``model1``, ...
    of_all = model_state if len(model.chunks) > 1 else model_state["model"]
    optimizer_state = model.optimizer.sharded_state_dict(of_all, is_loading=is_loading, metadata=_RESHARDABLE)
    return {**model_state, "optimizer": optimizer_state, "lr_schedule": model.lr_schedule.state_dict()}


def _chunk_key(model: TrainedModel, index: int) -> str:
    return f"model{index}" if len(model.chunks) > 1 else "model"


def save_checkpoint(folder: Path, learner: Learner, state: RunState) -> None:
    """Write a checkpoint: a folder per model. Every rank must call it.

    Raises:
        ConfigError: there is one in that folder already.
    """
    if (folder / RUN_STATE_FILE).exists():
        raise ConfigError(f"checkpoint {folder} exists already; choose another checkpoint_config.output_dir")
    dist.barrier()
    if learner.runtime.is_writer:
        for name in learner.models:
            (folder / name).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    for name, model in learner.models.items():
        dist_checkpointing.save(_sharded_state(model, is_loading=False), str(folder / name))
    dist.barrier()
    if learner.runtime.is_writer:
        content = {
            "next_step": state.next_step,
            "mode": state.mode,
            "fixed": dict(state.fixed),
            "scheduler": dict(state.scheduler),
            "learner": dict(state.learner),
        }
        save_json(folder / RUN_STATE_FILE, content)
    dist.barrier()


def read_run_state(folder: Path) -> RunState:
    """Where the checkpointed run stood; reads one small file and builds nothing.

    Raises:
        ConfigError: the folder is no checkpoint, or the file is not what ``save_checkpoint`` writes.
    """
    path = folder / RUN_STATE_FILE
    if not path.is_file():
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is not a checkpoint ({RUN_STATE_FILE} is missing); give a folder such "
            f"as {{output_dir}}/checkpoints/step_000010"
        )
    try:
        content = load_json_object(path)
    except ValueError as error:
        raise _broken(path, f"it {error}") from error
    problems = [
        f"{name} is {json.dumps(content[name])}, should be {kind}" if name in content else f"{name} is missing"
        for name, (is_valid, kind) in _STATE_FIELDS.items()
        if name not in content or not is_valid(content[name])
    ]
    if problems:
        raise _broken(path, "; ".join(problems))
    return RunState(**{name: content[name] for name in _STATE_FIELDS})


def _is_step(value: JSON) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_STATE_FIELDS: Mapping[str, tuple[Callable[[JSON], bool], str]] = {
    "next_step": (_is_step, "a step"),
    "mode": (lambda value: isinstance(value, str), "a string"),
    "fixed": (lambda value: isinstance(value, dict), "an object"),
    "scheduler": (lambda value: isinstance(value, dict), "an object"),
    "learner": (lambda value: isinstance(value, dict), "an object"),
}


def _broken(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"resume_from_checkpoint: {path} is broken: {problem}; resume from another checkpoint")


def load_checkpoint(folder: Path, learner: Learner, state: RunState) -> None:
    """Set models, optimizers and schedules from a checkpoint of any layout. Every rank must call it."""
    for name, model in learner.models.items():
        _load_model(folder / name, model)
    learner.load_state_dict(state.learner)


def _load_model(folder: Path, model: TrainedModel) -> None:
    on_torch_adam = [optimizer for optimizer in model.optimizers if _is_distributed_torch_adam(optimizer)]
    for optimizer in on_torch_adam:
        _allocate_state(optimizer)
        _keep_steps_while_loading(optimizer)
    loaded = dist_checkpointing.load(_sharded_state(model, is_loading=True), str(folder))
    for index, chunk in enumerate(model.chunks):
        unwrapped(chunk).load_state_dict(loaded[_chunk_key(model, index)])
    model.optimizer.load_state_dict(loaded["optimizer"])
    for optimizer in on_torch_adam:
        _separate_steps(optimizer)
    model.lr_schedule.num_steps = 0  # loading adds the stored number to it
    model.lr_schedule.load_state_dict(loaded["lr_schedule"])


# Megatron's distributed optimizer loads into TransformerEngine's and apex's Adam, which keep one step per group. On
# torch's, with a step per parameter, three things are missing in megatron-core 0.16.1; all that follows can go when
# ``DistributedOptimizer.load_state_dict`` works on a fresh ``torch.optim.AdamW``.


def _is_distributed_torch_adam(optimizer: MegatronOptimizer) -> bool:
    return isinstance(optimizer, DistributedOptimizer) and isinstance(
        optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW
    )


def _inner_parameters(optimizer: DistributedOptimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]]


def _allocate_state(optimizer: DistributedOptimizer) -> None:
    """Make the state that torch's Adam makes at its first update: reading the step of an empty one fails."""
    state = optimizer.optimizer.state
    for parameter in _inner_parameters(optimizer):
        if not state[parameter]:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            state[parameter] = {"step": torch.tensor(0.0), **moments}


def _keep_steps_while_loading(optimizer: DistributedOptimizer) -> None:
    """Let parameter states be set without a step: it was set before, and the loaded states have none."""

    def set_states(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        current = optimizer._get_main_param_and_optimizer_states(model_param)
        for name, value in tensors.items():
            current[name].copy_(value)

    optimizer._set_main_param_and_optimizer_states = set_states


def _separate_steps(optimizer: DistributedOptimizer) -> None:
    """Give every parameter a step of its own: loading puts one tensor into all, which each would then count up."""
    for parameter in _inner_parameters(optimizer):
        state = optimizer.optimizer.state[parameter]
        state["step"] = state["step"].clone()
