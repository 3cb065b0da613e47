"""The random states of one rank: torch's generators and Megatron's tracker of states by tensor-parallel rank.

Contract: ``{folder}/rank_00000.safetensors`` holds one uint8 tensor per state and, in its metadata, the layout in which
the run was: the tracker's states differ by tp, pp and ep rank, and mean nothing in another layout. No pickle.
"""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import safe_open
from safetensors.torch import save_file

from pipelines.megatron.process.host_device import has_cuda
from pipelines.megatron.process.runtime import Runtime

_TRACKER = "tracker."


def _path(folder: Path, runtime: Runtime) -> Path:
    return folder / f"rank_{runtime.global_rank:05d}.safetensors"


def save_random_states(folder: Path, runtime: Runtime, *, layout: str) -> None:
    """Write this rank's states; the folder must be there. Does not communicate."""
    states = {"cpu": torch.get_rng_state()}
    if has_cuda():
        states["cuda"] = torch.cuda.get_rng_state()
    states |= {f"{_TRACKER}{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    # Copies: on the host the tracker's first state and torch's are one tensor, which the format refuses.
    copies = {name: state.detach().to("cpu", copy=True).contiguous() for name, state in states.items()}
    save_file(copies, _path(folder, runtime), metadata={"layout": layout})


def load_random_states(folder: Path, runtime: Runtime, *, layout: str) -> bool:
    """Set this rank's states where they were saved in the same layout; whether they were. Does not communicate."""
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
