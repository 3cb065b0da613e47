"""Checkpoints are written under one layout and read under any other.

Contract: ``{folder}/{model}`` holds the whole tensors of each model under training as boxes (``stored_boxes``):
``parameter/``, ``buffer/`` (the bias of experts), and Adam's state of each parameter: ``exp_avg/``, ``exp_avg_sq/``
and, of a bfloat16 parameter, ``fp32_param/``, each with the canonical name behind it. ``{folder}/random_states`` holds
the random states of each rank. ``{folder}/huggingface`` is there where the run began with such a checkpoint
(``hf_source``). All others are safetensors files; nothing in a checkpoint is code. Every file and folder is on
the disk before ``run_state.json``, written last, which seals all others: a folder without it is no checkpoint.
The ranks write their files themselves, in their own processes: a rank that ends leaves nothing that goes on writing.

Random states are torch's generators and Megatron's tracker, one uint8 tensor each; no pickle. The tracker's differ by
tp, pp and ep rank, and nothing in training draws from them (its randomness follows from seeds and names): they are set
again under the same layout only, and stay as seeded under another.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import SafetensorError, safe_open

from mock_scheduler.determinism.agreement import TorchRankGroup
from mock_scheduler.errors import ConfigError
from mock_scheduler.megatron.host_device import has_cuda
from mock_scheduler.megatron.observed_model import unwrapped
from mock_scheduler.megatron.optimizer_state import (
    ParameterState,
    count_updates,
    read_states,
    state_dtype,
    state_names,
    write_states,
)
from mock_scheduler.megatron.perturbation import Perturbation, perturb_weights
from mock_scheduler.support.files import remove_leftovers
from pipelines.megatron.file_seals import FileSeal, write_sealed
from pipelines.megatron.hf_source import SOURCE_FOLDER, HuggingFaceSource, write_source
from pipelines.megatron.learner import Learner
from pipelines.megatron.old_checkpoint import load_old_states
from pipelines.megatron.process_of_rank import Runtime
from pipelines.megatron.run_state import RUN_STATE_FILE, ModelCounters, RunState, write_run_state
from pipelines.megatron.stored_boxes import (
    PARAMETER_KEY,
    LocalTensor,
    StoredTensors,
    encode_tensors,
    rank_path,
    write_tensors,
)
from pipelines.megatron.trained_model import TrainedModel

_RANDOM_STATES = "random_states"
_BUFFER = "buffer"


def save_checkpoint(
    folder: Path, learner: Learner, state: RunState, *, source: HuggingFaceSource | None = None
) -> None:
    """Write a checkpoint: a folder per model. Every rank must call it.

    ``source``: the Hugging Face checkpoint that the run began with.

    Raises:
        ConfigError: there is one in that folder already, or a file cannot be written.
    """
    if (folder / RUN_STATE_FILE).exists():
        raise ConfigError(f"checkpoint {folder} exists already; choose another checkpoint_config.output_dir")
    try:
        _write(folder, learner, state, source)
    except OSError as error:
        raise ConfigError(
            f"checkpoint {folder} cannot be written: {error.strerror or error}. Without {RUN_STATE_FILE} it is no "
            "checkpoint; make room, or choose another checkpoint_config.output_dir, and resume from the one before"
        ) from error


def _write(folder: Path, learner: Learner, state: RunState, source: HuggingFaceSource | None) -> None:
    runtime = learner.runtime
    ranks = TorchRankGroup(runtime.device)
    dist.barrier()
    if runtime.is_writer:
        for name in (*learner.models, _RANDOM_STATES, SOURCE_FOLDER):
            # Left by a run that ended while it saved: without its last file it is no checkpoint.
            shutil.rmtree(folder / name, ignore_errors=True)
        remove_leftovers(folder)
    dist.barrier()
    seals: dict[str, FileSeal] = {}
    counters: dict[str, ModelCounters] = {}
    for name, model in learner.models.items():
        written = write_tensors(folder / name, list(_tensors_of(model)), ranks)
        seals |= {f"{name}/{file}": seal for file, seal in written.items()}
        counters[name] = ModelCounters(
            num_updates=count_updates(model.observed, device=runtime.device), lr_steps=model.lr_schedule.num_steps
        )
    written = save_random_states(folder / _RANDOM_STATES, runtime, layout=learner.config.parallel.describe())
    seals |= {f"{_RANDOM_STATES}/{file}": seal for file, seal in written.items()}
    if source is not None and runtime.is_writer:
        seals |= write_source(folder, source)
    files = _gather_seals(seals, ranks)  # no rank is here before its files are on the disk
    if runtime.is_writer:
        write_run_state(folder, replace(state, counters=counters, files=files))
    dist.barrier()


def _gather_seals(seals: Mapping[str, FileSeal], ranks: TorchRankGroup) -> dict[str, FileSeal]:
    gathered = ranks.gather(json.dumps({name: asdict(seal) for name, seal in seals.items()}).encode())
    parts = [json.loads(part) for part in gathered]
    return {name: FileSeal(**fields) for part in parts for name, fields in part.items()}


def _tensors_of(model: TrainedModel) -> Iterator[LocalTensor]:
    """Yields all tensors of this rank. Collective, over dp."""
    states = read_states(model.observed)
    for local in model.parameters():
        name = local.spec.name
        yield LocalTensor(key=f"{PARAMETER_KEY}/{name}", spec=local.spec, tensor=local.parameter)
        for kind, tensor in states[local.parameter].items():
            yield LocalTensor(key=f"{kind}/{name}", spec=local.spec, tensor=tensor)
    for buffer in model.state_buffers():
        yield LocalTensor(key=f"{_BUFFER}/{buffer.spec.name}", spec=buffer.spec, tensor=buffer.buffer)


def load_checkpoint(folder: Path, learner: Learner, state: RunState) -> None:
    """Set models, optimizers and schedules from a checkpoint of any layout. Every rank must call it.

    Weights are moved as initial ones are, where the run has a perturbation. Whoever calls it has checked the contents
    (``run_state.check_contents``).

    Raises:
        ConfigError: a model's files cannot be read, or hold another model.
    """
    perturbation = Perturbation.build(learner.config.perturbation)
    for name, model in learner.models.items():
        if state.is_sealed:
            counters, states = _load_tensors(folder, name, model, state)
        else:
            counters, states = load_old_states(folder / name, model)
        write_states(model.observed, states, num_updates=counters.num_updates)
        if perturbation is not None:
            perturb_weights(model.observed, perturbation)
        model.lr_schedule.num_steps = 0  # its step adds to it
        model.lr_schedule.step(increment=counters.lr_steps)
    # As of tensors, only sealed files are the checkpoint's.
    own = rank_path(Path(_RANDOM_STATES), learner.runtime.global_rank).as_posix()
    if own in state.files:
        load_random_states(folder / _RANDOM_STATES, learner.runtime, layout=learner.config.parallel.describe())
    try:
        learner.load_state_dict(state.learner)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"resume_from_checkpoint: {folder / RUN_STATE_FILE}: learner is no state of this release: {error!r}\n"
            "Resume from another checkpoint."
        ) from error


@torch.no_grad()
def _load_tensors(
    folder: Path, name: str, model: TrainedModel, state: RunState
) -> tuple[ModelCounters, dict[torch.nn.Parameter, ParameterState]]:
    """Sets parameters and buffers; returns the counters, and the states of Adam for ``write_states``."""
    # Sealed files alone: another one in the folder is not the checkpoint's.
    paths = [folder / file for file in sorted(state.files) if file.startswith(f"{name}/")]
    if name not in state.counters or not paths:
        raise ConfigError(
            f"resume_from_checkpoint: {folder} has no model {name}, but {', '.join(sorted(state.counters)) or 'none'}\n"
            "Resume from another checkpoint."
        )
    for chunk in model.chunks:
        # Megatron's routers (0.16.1) widen their experts' bias to float32 only when they are run or asked for state.
        unwrapped(chunk).state_dict()
    states: dict[torch.nn.Parameter, ParameterState] = {}
    with StoredTensors(paths) as stored:
        for local in model.parameters():
            spec, parameter = local.spec, local.parameter
            parameter.copy_(stored.read(f"{PARAMETER_KEY}/{spec.name}", spec, parameter.dtype))
            dtype = state_dtype(parameter)
            states[parameter] = {
                kind: stored.read(f"{kind}/{spec.name}", spec, dtype).to(parameter.device)
                for kind in state_names(parameter)
            }
        for buffer in model.state_buffers():
            spec = buffer.spec
            buffer.buffer.copy_(stored.read(f"{_BUFFER}/{spec.name}", spec, buffer.buffer.dtype))
    return state.counters[name], states


_TRACKER = "tracker."
_LAYOUT = "layout"


def save_random_states(folder: Path, runtime: Runtime, *, layout: str) -> dict[str, FileSeal]:
    """Writes this rank's states; returns the seal of the file by its name. Does not communicate."""
    states = {"cpu": torch.get_rng_state()}
    if has_cuda():
        states["cuda"] = torch.cuda.get_rng_state()
    states |= {f"{_TRACKER}{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    tensors = {name: state.detach().cpu() for name, state in states.items()}
    path = rank_path(folder, runtime.global_rank)
    return {path.name: write_sealed(path, encode_tensors(tensors, metadata={_LAYOUT: layout}))}


def load_random_states(folder: Path, runtime: Runtime, *, layout: str) -> bool:
    """Sets this rank's states where they were saved in the same layout; returns whether they were. Does not
    communicate.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = rank_path(folder, runtime.global_rank)
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get(_LAYOUT) != layout:
                return False
            states = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file, not a mapping
        _set_states(states)
    # torch raises RuntimeError or TypeError for a state of another size or dtype.
    except (OSError, SafetensorError, KeyError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"resume_from_checkpoint: {path} has no random states: {error}\nResume from another checkpoint."
        ) from error
    return True


def _set_states(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if has_cuda() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    tracked = {name.removeprefix(_TRACKER): state for name, state in states.items() if name.startswith(_TRACKER)}
    get_cuda_rng_tracker().set_states(tracked)
