"""The random states of a rank: torch's generators and Megatron's tracker, one uint8 tensor each; no pickle.

The tracker's states differ by tp, pp and ep rank, and nothing in training draws from them (its randomness follows from
seeds and names): they are set again under the same layout only, and stay as seeded under another.
"""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import SafetensorError, safe_open

from mock_scheduler.errors import ConfigError
from mock_scheduler.megatron.host_device import has_cuda
from pipelines.megatron.file_seals import FileSeal, write_sealed
from pipelines.megatron.process.runtime import Runtime
from pipelines.megatron.stored_boxes import encode_tensors, rank_path

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
