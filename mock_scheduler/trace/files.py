"""Trace files: the gradients and parameters of each training step, one safetensors file per step and rank.

Contract::

    {trace_dir}/step_000000/rank_00000.safetensors

Tensors are stored under ``{update:06d}/{kind}/{canonical name}``. One metadata key, ``mock_scheduler.trace``, holds
canonical JSON: format version, step, global rank, world size, rank coordinates, and per tensor its dtype, shard
spec and digest; it is sealed as ``digests`` says. Equal content gives equal bytes. A file's
presence is its completeness, as ``files`` says. Nothing is pickled, no code runs on load.

``reader`` is the other half.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mock_scheduler.digests import JSON, canonical_json, compute_tensor_digest, seal
from mock_scheduler.errors import TraceError
from mock_scheduler.files import written_aside
from mock_scheduler.tensor_bytes import dtype_name
from mock_scheduler.trace.entries import StepFooter, TraceEntry
from mock_scheduler.trace.footers import footer_as_json
from mock_scheduler.trace.kinds import TraceKind

FORMAT_VERSION = 3
METADATA_KEY = "mock_scheduler.trace"

STEP_FOLDER = re.compile(r"step_(\d{6,})")
RANK_FILE = re.compile(r"rank_(\d{5,})\.safetensors")
_BIT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def view_as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width and shape: equal where, and only where, the bits are equal."""
    return tensor.view(_BIT_DTYPES[tensor.element_size()])


def step_folder(trace_dir: Path, step: int) -> Path:
    """The folder of one step."""
    return trace_dir / f"step_{step:06d}"


def remove_steps_from(trace_dir: Path, step: int) -> None:
    """Remove the traced steps that a resumed run computes anew; earlier ones stay. One rank calls it.

    The others write their first trace only after the first batch, for which they wait for each other.
    """
    for folder in trace_dir.glob("step_*"):
        name = STEP_FOLDER.fullmatch(folder.name)
        if name is not None and int(name[1]) >= step:
            shutil.rmtree(folder)


def save_rank_trace(
    trace_dir: Path,
    *,
    step: int,
    global_rank: int,
    world_size: int,
    coordinates: Mapping[str, int],
    entries: Sequence[TraceEntry],
    footer: StepFooter | None = None,
) -> Path:
    """Write everything that one rank traces of one step; return the file's path.

    Every rank calls it, also one without entries; it does not communicate. Only the elements in a spec's
    ``flat_range`` are stored. Raises ``TraceError`` for a tensor that does not have its spec's shape, for a tensor
    given twice, and where the file is there already.
    """
    path = step_folder(trace_dir, step) / f"rank_{global_rank:05d}.safetensors"
    if path.exists():
        raise TraceError(f"{path} exists: this step is traced already; choose another output_dir or remove the trace")
    tensors: dict[str, torch.Tensor] = {}
    records: dict[str, JSON] = {}
    counts: dict[str, int] = {}
    for entry in entries:
        name = stored_name(entry.update, entry.kind, entry.spec.name)
        piece = counts[name] = counts.get(name, -1) + 1
        if piece and not entry.is_by_token:
            raise TraceError(f"step {step}, global rank {global_rank}: {name} is given twice")
        name = f"{name}#{piece}" if piece else name
        tensors[name] = _owned_elements(entry, step=step, global_rank=global_rank)
        records[name] = _describe_entry(entry, tensors[name])
    content: dict[str, JSON] = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "global_rank": global_rank,
        "world_size": world_size,
        "coordinates": dict(coordinates),
        "tensors": records,
        "footer": footer_as_json(footer or StepFooter()),
    }
    metadata = {METADATA_KEY: canonical_json(seal(content))}
    try:
        with written_aside(path) as aside:
            save_file(tensors, aside, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{path}: the trace cannot be written: {error}") from error
    return path


def stored_name(update: int, kind: TraceKind, name: str) -> str:
    """A tensor's name in the file."""
    return f"{update:06d}/{kind}/{name}"


def _owned_elements(entry: TraceEntry, *, step: int, global_rank: int) -> torch.Tensor:
    """A copy on the CPU of the elements that this rank owns."""
    spec, shape = entry.spec, tuple(entry.tensor.shape)
    tensor = entry.tensor.detach()
    if spec.flat_range is None:
        expected = [spec.local_shape]
    else:
        start, stop = spec.flat_range
        expected = [spec.local_shape, (stop - start,)]
        if shape == spec.local_shape:
            tensor = tensor.reshape(-1)[start:stop]
    if shape not in expected:
        wanted = " or ".join(str(list(choice)) for choice in expected)
        raise TraceError(
            f"step {step}, global rank {global_rank}: {entry.kind} of {spec.name} has shape {list(shape)}, "
            f"its shard spec says {wanted}"
        )
    return tensor.to("cpu", copy=True).contiguous()


def _describe_entry(entry: TraceEntry, owned: torch.Tensor) -> dict[str, JSON]:
    spec = entry.spec
    return {
        "update": entry.update,
        "kind": entry.kind,
        "name": spec.name,
        "dtype": dtype_name(owned.dtype),
        "global_shape": list(spec.global_shape),
        "local_shape": list(spec.local_shape),
        "splits": [
            [split.dim, [[block.local_start, block.global_start, block.length] for block in split.blocks]]
            for split in spec.splits
        ],
        "dims": list(entry.dims),
        "is_masked": entry.is_masked,
        "flat_range": list(spec.flat_range) if spec.flat_range is not None else None,
        "digest": compute_tensor_digest(owned),
    }
