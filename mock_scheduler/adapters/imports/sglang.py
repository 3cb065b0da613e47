"""What SGLang's dumper wrote, as a trace: a folder of ``step=…___rank=…___dump_index=…___name=….pt``.

Each file holds ``{"value", "meta"}``. SGLang and miles write such folders (``DUMPER_ENABLE=1``, ``--dumper-enable``).
Contract: ``dims`` in the meta say where a tensor lies in the whole one (``sglang_dims``). A tensor without them is
whole in a run of one process; of several, each rank has its own. Tensors stand in the order in which they were
dumped, later pipeline stages behind the earlier ones, in the backward pass before them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.adapters.imports.sglang_dims import AxisPlace, place_tensor, read_places
from mock_scheduler.adapters.imports.steps import find_files
from mock_scheduler.adapters.imports.traces import (
    MAX_EXPANDED_BYTES,
    RankTensors,
    Traces,
    list_apart,
    name_apart,
    name_tensor,
    write_ranks,
)
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.errors import ForeignFileError
from mock_scheduler.support.pickles.torch_files import read_torch_file
from mock_scheduler.support.tensor_bytes import compute_tensor_digest
from mock_scheduler.trace.entries import TraceEntry, Unobserved
from mock_scheduler.trace.shards import whole

_PATTERN = r"step=(\d+)___rank=(\d+)___dump_index=(\d+)___name=[^/]+\.pt"
_EXAMPLE = "step=0___rank=0___dump_index=1___name=hidden_states.pt"
_GRAD, _PARAM = "grad__", "param__"
#: What both runs must share to be compared.
_INPUTS = frozenset({"input_ids", "position_ids", "positions", "seq_lens", "cu_seqlens_q", "cu_seqlens_kv"})
#: Places in an engine's own memory.
_SLOTS = frozenset({"req_pool_indices", "rids"})
_OWN_META = re.compile(
    r"step|rank|dump_index|name|recompute_\w+|world_\w+|\w+_parallel_info|tokenizer_path|dims|dims_grad|\w+_rank"
)
#: More than a rank dumps of a step.
_STAGE = 1 << 32


@dataclass(slots=True)
class _RankStep:
    """The files of one rank and step, and what was met in them so far."""

    files: list[tuple[int, Path]] = field(default_factory=list)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    first_digests: dict[str, str] = field(default_factory=dict)
    unobserved: list[Unobserved] = field(default_factory=list)


def write_dumps(source: Path, folder: Path) -> Traces:
    """Writes a trace of one folder of dumps; gives its steps. Raises as ``gradients.write_vime``."""
    found: dict[tuple[int, int], _RankStep] = {}
    for file in find_files(source, _PATTERN, _EXAMPLE):
        step, rank, index = map(int, file.parts)
        found.setdefault((step, rank), _RankStep()).files.append((index, file.path))
    inside = source if source.is_dir() else None
    writers = {step: tuple(sorted(rank for own, rank in found if own == step)) for step, _ in found}
    ranks = (_read_rank(step, rank, own, inside, writers[step]) for (step, rank), own in sorted(found.items()))
    return {"": write_ranks(ranks, folder)}


def _read_rank(step: int, rank: int, own: _RankStep, inside: Path | None, writers: Sequence[int]) -> RankTensors:
    own.files.sort()
    first = _load(own.files[0][1], inside)[1]
    world_size, stated = first.get("world_size", 1), first.get("rank", rank)
    if type(world_size) is not int or stated != rank or not 0 <= rank < world_size or writers[-1] >= world_size:
        raise ForeignFileError(f"{own.files[0][1]} says that it is of rank {stated!r} of {world_size!r}")
    return RankTensors(
        step=step,
        rank=rank,
        world_size=world_size,
        entries=_read_files(own, inside, world_size),
        coordinates={axis: place.rank for axis, place in read_places(first, str(own.files[0][1])).items()},
        ranks=tuple(writers),
        unobserved=own.unobserved,
    )


def _load(path: Path, inside: Path | None) -> tuple[Any, Mapping[str, Any]]:
    content = read_torch_file(path, inside=inside, what="a dump of SGLang's", max_expanded_bytes=MAX_EXPANDED_BYTES)
    if (
        not isinstance(content, dict)
        or not {"value", "meta"} <= content.keys()
        or not isinstance(content["meta"], dict)
    ):
        raise ForeignFileError(
            f"{path} holds no value and meta, as the dumper of SGLang 0.5.9 and later writes them: dump again with it"
        )
    return content["value"], content["meta"]


def _read_files(own: _RankStep, inside: Path | None, world_size: int) -> Iterator[TraceEntry]:
    for index, path in own.files:
        value, meta = _load(path, inside)
        base = str(meta.get("name"))
        kind = _kind_of(base)
        name = _name_call(own, kind, _name_of(base, meta), str(meta.get("recompute_status")))
        if not isinstance(value, torch.Tensor):
            own.unobserved.append(_unobserved(kind, name, f"its value is a {type(value).__name__}, and no tensor"))
            continue
        if not value.numel():
            own.unobserved.append(_unobserved(kind, name, "it has no element on this rank"))
            continue
        if base in _SLOTS:
            own.unobserved.append(_unobserved(kind, name, "places in the engine's memory are no result"))
            continue
        if meta.get("recompute_status") == "recompute":
            # As a trace of ours: what is computed again is there where it has other bits.
            if own.first_digests.get(name) == compute_tensor_digest(value):
                continue
            kind = "recomputed"
        elif meta.get("recompute_status") == "original":
            own.first_digests[name] = compute_tensor_digest(value)
        places = read_places(meta, str(path))
        dims = meta.get("dims")
        shape = tuple(value.shape)
        if isinstance(dims, str):
            spec = place_tensor(name, shape, dims, places, str(path))
        else:
            rank = int(meta["rank"])
            spec = whole(name_apart(name, "rank", rank, world_size) if world_size > 1 else name, shape)
        if spec.name != name:
            own.unobserved.append(list_apart(kind, name))
        yield TraceEntry(update=0, kind=kind, spec=spec, tensor=value, place=index + _stage_of(kind, places) * _STAGE)


def _kind_of(name: str) -> TraceKind:
    if name.startswith(_GRAD):
        return "gradient" if name.startswith(f"{_GRAD}{_PARAM}") else "activation_gradient"
    if name in _INPUTS:
        return "input"
    return "initial" if name.startswith(_PARAM) else "activation"


def _name_of(base: str, meta: Mapping[str, Any]) -> str:
    """Makes the name of the dump's own, its layer and its further tags."""
    text = base.removeprefix(_GRAD).removeprefix(_PARAM)
    tags = {str(key): item for key, item in meta.items() if not _OWN_META.fullmatch(str(key))}
    layer = tags.pop("layer_id", None)
    text = text if layer is None else f"layers.{layer}.{text}"
    return name_tensor("".join([name_tensor(text), *(f".{key}={item}" for key, item in sorted(tags.items()))]))


def _name_call(own: _RankStep, kind: TraceKind, name: str, status: str) -> str:
    """Tells the second dump of one name in a step, and later ones, from the first."""
    key = f"{kind} {status}", name
    number = own.calls[key]
    own.calls[key] += 1
    return f"{name}.call{number}" if number else name


def _unobserved(kind: TraceKind, name: str, reason: str) -> Unobserved:
    return Unobserved(kind=kind, name=name, reason=reason)


def _stage_of(kind: TraceKind, places: Mapping[str, AxisPlace]) -> int:
    """Counts the stages of the forward pass, then those of the backward pass, then what stands behind both."""
    stage = places.get("pp", AxisPlace(0, 1))
    if kind in ("gradient", "initial"):
        return 2 * stage.size
    return 2 * stage.size - 1 - stage.rank if kind == "activation_gradient" else stage.rank
