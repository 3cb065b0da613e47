"""Distributed checkpoints: written under one layout, read under any other.

Contract: ``{folder}/{model}`` holds Megatron's distributed checkpoint of each model under training: parameters and
buffers (the bias of experts among them), Adam's state of each parameter, the number of updates and the schedule.
``{folder}/random_states/rank_00000.safetensors`` holds the random states of one rank; nothing draws from them in
training, whose randomness follows from seeds and names, so they are set again only under the same layout, and are
otherwise left as the run's seed made them. ``{folder}/run_state.json`` holds step, mode, the settings that the tensors
follow from, the states of rollout scheduler and learner, and the size of every other file. It is written last: a
folder without it is not a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.api import CheckpointException

from mock_scheduler.config.base import Decides
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.files import load_json_object, save_json
from mock_scheduler.support.text import bullet_list
from pipelines.config.schema import PipelineConfig
from pipelines.keys import effect_of, keys_in_effect
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
from pipelines.megatron.process.random_states import load_random_states, save_random_states
from pipelines.megatron.trained_model import TrainedModel

RUN_STATE_FILE = "run_state.json"
_RANDOM_STATES = "random_states"
_FILES = "files"

_SHARDED = (ShardedTensor, ShardedTensorFactory)
_Sharded = Any  # one of these, of Megatron's


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
    values = keys_in_effect(config, vocab_size=vocab_size)
    return {
        **{key: value for key, value in values.items() if _is_handed_on(effect_of(key))},
        "models": ["policy", "critic"] if config.adv_estimator == "gae" else ["policy"],
    }


def _is_handed_on(facts: Decides) -> bool:
    # The state is that of training: validation may be another after it.
    return Decides.STATE in facts and Decides.VALIDATION not in facts


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
        content = {
            "next_step": state.next_step,
            "mode": state.mode,
            "fixed": dict(state.fixed),
            "scheduler": dict(state.scheduler),
            "learner": dict(state.learner),
            _FILES: _file_sizes(folder),
        }
        save_json(folder / RUN_STATE_FILE, content)
    dist.barrier()


def _save_model(folder: Path, model: TrainedModel) -> None:
    chunks = _sharded_chunks(model)
    states = _sharded_states(chunks, read_states(model))
    num_updates = count_updates(model, device=model.runtime.device)
    further = {"optimizer": states, "num_updates": num_updates, "lr_schedule": model.lr_schedule.state_dict()}
    dist_checkpointing.save({**chunks, **further}, str(folder))


def _file_sizes(folder: Path) -> dict[str, int]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RUN_STATE_FILE)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def check_files(folder: Path) -> None:
    """Refuse a checkpoint of which a file is missing or cut off; looks at sizes and reads nothing but the run state.

    Raises:
        ConfigError: with every file that is not as it was written.
    """
    path = folder / RUN_STATE_FILE
    written, found = load_json_object(path).get(_FILES), _file_sizes(folder)
    if not isinstance(written, dict) or not written:
        raise _broken(path, f"{_FILES} is missing")
    problems = [
        f"{name}: written with {size} bytes, found {f'with {found[name]}' if name in found else 'missing'}"
        for name, size in written.items()
        if found.get(name) != size
    ]
    if problems:
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is not whole:{bullet_list(problems, limit=10)}\n"
            "Copy it again from where it was written, or resume from another checkpoint."
        )


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
    """Move every parameter, and the wide copy in its state, of which the parameter stays the rounded value."""
    for local in model.parameters():
        parameter, state = local.parameter, states[local.parameter]
        wide = state.get(WIDE_COPY, parameter)
        wide.copy_(perturbation.of_weight(wide, local.spec, parameter.dtype))
        parameter.copy_(wide)


def _empty_state(parameter: torch.nn.Parameter) -> ParameterState:
    dtype = state_dtype(parameter)
    return {name: torch.empty_like(parameter, dtype=dtype).detach() for name in state_names(parameter)}
