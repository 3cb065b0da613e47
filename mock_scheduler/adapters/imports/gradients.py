"""Gradients that other programs left of a training, as a trace that ``compare`` opens.

vime's ``--ci-save-parameter-grads DIR`` writes ``DIR/ROLE/rollout-N/step-M/rank-R.pt``: of each parameter the slice of
the reduced gradient that the rank's optimizer owns, where it begins in the flattened local tensor, and how tensor
parallelism splits it. Megatron-LM's ``--save-wgrads-interval`` and ``--save-params-interval`` write
``iter_N/mp_rank_*.pth``: whole local tensors by chunk, without a word about how they are split.

Contract: the pieces are placed as their files say, nothing is computed. vime's are comparable across layouts. Names of
Megatron's begin with their file and chunk, so that only equal layouts have equal names. vime's rollout is the step, its
step the update.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.adapters.imports.steps import find_files
from mock_scheduler.adapters.imports.traces import RankTensors, Traces, write_ranks
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.errors import ForeignFileError, TraceError
from mock_scheduler.support.pickles.torch_files import read_torch_file
from mock_scheduler.trace.entries import TraceEntry
from mock_scheduler.trace.shards import ShardSpec, even_split, whole

_VIME = r"(?:[^/]*/)*rollout-(\d+)/step-(\d+)/rank-(\d+)\.pt"
_MEGATRON = r"(?:[^/]*/)*(wgrads|params)/iter_(\d+)/(mp_rank_\w+)\.pth"
_KINDS: Mapping[str, TraceKind] = {"wgrads": "gradient", "params": "parameter"}
_RECORD = {"shape", "start", "grad", "tp_rank", "tp_size", "partition_dim", "partition_stride", "glu"}


def write_vime(source: Path, folder: Path) -> Traces:
    """Writes a trace of vime's gradients of one role; gives its steps.

    Raises:
        RecordingError: there is none.
        ForeignFileError: a file cannot be read, or contradicts itself.
        TraceError: ranks are missing, or pieces are given twice.
    """
    files: dict[tuple[int, int], list[tuple[int, Path]]] = {}
    for file in find_files(source, _VIME, "rollout-0/step-0/rank-0.pt"):
        rollout, update, rank = map(int, file.parts)
        files.setdefault((rollout, rank), []).append((update, file.path))
    inside = source if source.is_dir() else None
    found = Counter(rollout for rollout, _ in files)
    ranks = (_read_vime(rollout, rank, own, inside, found[rollout]) for (rollout, rank), own in sorted(files.items()))
    return {"": write_ranks(ranks, folder)}


def write_megatron(source: Path, folder: Path) -> Traces:
    """Writes a trace of Megatron's saved gradients and parameters; gives its steps. Raises as ``write_vime``."""
    entries: dict[int, list[TraceEntry]] = {}
    inside = source if source.is_dir() else None
    for file in find_files(source, _MEGATRON, "wgrads/iter_0000001/mp_rank_00.pth"):
        kind, iteration, place = file.parts
        content = read_torch_file(file.path, inside=inside, what="a file of saved gradients")
        entries.setdefault(int(iteration), []).extend(_read_chunks(content, _KINDS[kind], place, file.path))
    steps = (RankTensors(step=step, rank=0, world_size=1, entries=own) for step, own in sorted(entries.items()))
    return {"": write_ranks(steps, folder)}


def _read_vime(
    rollout: int, rank: int, files: list[tuple[int, Path]], inside: Path | None, num_ranks: int
) -> RankTensors:
    entries, world_sizes = [], set()
    for update, path in sorted(files):
        content = read_torch_file(path, inside=inside, what="a snapshot of gradients")
        if not isinstance(content, dict) or content.get("version") != 1 or content.get("rank") != rank:
            raise ForeignFileError(f"{path} is no snapshot of version 1 of rank {rank}")
        world_sizes.add(content["world_size"])
        for name, record in content["tensors"].items():
            entry = _read_piece(str(name), record, update, path)
            if entry is not None:
                entries.append(entry)
    (world_size,) = world_sizes if len(world_sizes) == 1 else (0,)
    if type(world_size) is not int or not 0 <= rank < world_size:
        raise TraceError(f"{files[0][1]}: rank {rank} of {sorted(map(str, world_sizes))} ranks")
    if world_size != num_ranks:
        raise TraceError(
            f"{files[0][1]}: rollout {rollout} is of {world_size} ranks, and {num_ranks} of them have files: put the "
            "files of all ranks there"
        )
    return RankTensors(step=rollout, rank=rank, world_size=world_size, entries=entries)


def _read_piece(name: str, record: Mapping[str, Any], update: int, path: Path) -> TraceEntry | None:
    """One parameter's slice; None where this rank owns nothing of it."""
    where = f"{path}, {name}"
    if not isinstance(record, dict) or not record.keys() >= _RECORD:
        raise ForeignFileError(f"{where} has other fields than {', '.join(sorted(_RECORD))}")
    shape, start, grad = record["shape"], record["start"], record["grad"]
    tp_rank, tp_size, dim = record["tp_rank"], record["tp_size"], record["partition_dim"]
    numbers = (*shape, start, tp_rank, tp_size, dim)
    is_sound = all(type(number) is int and number >= 0 for number in numbers) and tp_rank < tp_size
    if not is_sound or not isinstance(grad, torch.Tensor) or grad.dim() != 1 or (tp_size > 1 and dim >= len(shape)):
        raise ForeignFileError(f"{where} is split as {numbers}, with a gradient that does not fit")
    if tp_size > 1 and record["glu"] and (dim != 0 or shape[0] % 2):
        raise ForeignFileError(f"{where} is a gated layer split along dimension {dim} of {list(shape)}")
    if tp_size > 1 and not record["glu"] and record["partition_stride"] != 1:
        raise ForeignFileError(f"{where} has a partition stride of {record['partition_stride']}, which is not read")
    if not len(grad):
        return None
    stop = start + len(grad)
    spec = ShardSpec(
        name=_strip(name),
        global_shape=tuple(size * (tp_size if place == dim else 1) for place, size in enumerate(shape)),
        local_shape=tuple(shape),
        splits=even_split(
            dim,
            size=shape[dim] * tp_size if shape else 1,
            rank=tp_rank,
            num_ranks=tp_size,
            num_parts=2 if record["glu"] else 1,
        ),
        flat_range=(start, stop),
    )
    return TraceEntry(update=update, kind="gradient", spec=spec, tensor=grad)


def _strip(name: str) -> str:
    """A parameter's name without the wrappers around the model."""
    return re.sub(r"^(?:module\.)+", "", name)


def _read_chunks(content: object, kind: TraceKind, place: str, path: Path) -> Iterator[TraceEntry]:
    if not isinstance(content, dict) or not all(isinstance(chunk, dict) for chunk in content.values()):
        raise ForeignFileError(f"{path} has no tensors by chunk")
    for chunk, tensors in content.items():
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise ForeignFileError(f"{path}, {chunk}: {name} is a {type(tensor).__name__}; expected a tensor")
            spec = whole(f"{place}.{chunk}.{_strip(str(name))}", tuple(tensor.shape))
            yield TraceEntry(update=0, kind=kind, spec=spec, tensor=tensor)
