"""What msprobe's PrecisionDebugger dumped with task ``tensor``, as a trace.

``step{N}/rank{R}/dump.json`` (``proc{PID}`` outside of a distributed run) lists calls of modules and functions in their
order, with arguments, results, parameters and gradients; ``dump_tensor_data`` beside it has a file for each tensor.
Contract: nothing says how a tensor is split, so each of several ranks has tensors of its own. Numbers among the
arguments are traced too: another epsilon is found where it is given. Dumps of statistics hold no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.adapters.imports.steps import find_files
from mock_scheduler.adapters.imports.traces import (
    MAX_EXPANDED_BYTES,
    RankTensors,
    Traces,
    name_apart,
    name_tensor,
    write_ranks,
)
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.errors import ForeignFileError
from mock_scheduler.support.foreign_files import load_json
from mock_scheduler.support.pickles.torch_files import read_torch_file
from mock_scheduler.support.text import is_real
from mock_scheduler.trace.entries import TraceEntry
from mock_scheduler.trace.shards import whole

_PATTERN = r"(?:.*/)?step(\d+)/(?:rank(\d+)|proc\d+)/dump\.json"
_EXAMPLE = "step0/rank0/dump.json"
_TENSORS = "dump_tensor_data"
_MAX_JSON_BYTES = 2**30
_INT64 = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A tensor's file, or a number, by what it is in its call."""

    kind: TraceKind
    name: str
    value: str | int | float


def write_dumps(source: Path, folder: Path) -> Traces:
    """Writes a trace of all steps and ranks; gives its steps. Raises as ``gradients.write_vime``."""
    files: dict[int, dict[int, Path]] = {}
    for file in find_files(source, _PATTERN, _EXAMPLE):
        step, rank = int(file.parts[0]), int(file.parts[1] or 0)
        earlier = files.setdefault(step, {}).setdefault(rank, file.path)
        if earlier != file.path:
            raise ForeignFileError(f"{earlier} and {file.path} are both of step {step}: give the dump of one process")
    inside = source if source.is_dir() else source.parent
    world_size = 1 + max(rank for ranks in files.values() for rank in ranks)
    return {
        "": write_ranks(
            (
                RankTensors(
                    step=step,
                    rank=rank,
                    world_size=world_size,
                    entries=_read_calls(path, inside, rank, world_size),
                    ranks=tuple(sorted(ranks)),
                )
                for step, ranks in sorted(files.items())
                for rank, path in sorted(ranks.items())
            ),
            folder,
        )
    }


def _read_calls(path: Path, inside: Path, rank: int, world_size: int) -> Iterator[TraceEntry]:
    try:
        document = load_json(path, inside=inside, max_bytes=_MAX_JSON_BYTES)
    except ValueError as error:
        raise ForeignFileError(f"{path} {error}") from error
    task = document.get("task") if isinstance(document, dict) else None
    if task != "tensor" or not isinstance(document.get("data"), dict):
        raise ForeignFileError(
            f'{path} is of task {task!r}, which holds no tensors; expected \'tensor\': set "task": "tensor" in '
            "config.json and dump again"
        )
    seen: set[tuple[TraceKind, str]] = set()
    place = 0
    for call, content in document["data"].items():
        for found in _find_values(str(call), content):
            # A module that is called again has the same parameters.
            if (found.kind, found.name) in seen:
                continue
            seen.add((found.kind, found.name))
            tensor = _load(path, found.value, inside)
            name = name_apart(found.name, "rank", rank, world_size) if world_size > 1 else found.name
            spec = whole(name, tuple(tensor.shape))
            yield TraceEntry(update=0, kind=found.kind, spec=spec, tensor=tensor, place=place)
            place += 1


def _find_values(call: str, content: Mapping[str, Any]) -> Iterator[_Found]:
    """Lists a call's values in the order of the file: parameters, arguments, results; gradients of parameters."""
    module, is_gradient, number = call.partition(".parameters_grad")
    if is_gradient:
        again = number.removeprefix(".0")
        for name, item in content.items():
            yield from _find_in(item, "gradient", f"{module}.{name}{again}", in_list=False)
        return
    kind: TraceKind = "activation_gradient" if ".backward" in call else "activation"
    owner = call.partition(".forward")[0]
    for name, item in (content.get("parameters") or {}).items():
        yield from _find_in(item, "initial", f"{owner}.{name}", in_list=False)
    for part in ("input_args", "input_kwargs", "input", "output"):
        yield from _find_in(content.get(part), kind, f"{call}.{part.removesuffix('_args').removesuffix('_kwargs')}")


def _find_in(item: Any, kind: TraceKind, name: str, *, in_list: bool = True) -> Iterator[_Found]:  # noqa: ANN401 - JSON
    if isinstance(item, list):
        for number, one in enumerate(item):
            yield from _find_in(one, kind, f"{name}.{number}" if in_list or number else name)
    elif isinstance(item, dict) and isinstance(item.get("data_name"), str):
        yield _Found(kind=kind, name=name_tensor(name), value=item["data_name"])
    elif isinstance(item, dict) and "type" in item:
        value = item.get("value")
        if isinstance(value, bool) or is_real(value):
            yield _Found(kind=kind, name=name_tensor(name), value=value)
    elif isinstance(item, dict):
        for key, one in item.items():
            yield from _find_in(one, kind, f"{name}.{key}")


def _load(path: Path, value: str | int | float, inside: Path) -> torch.Tensor:
    if not isinstance(value, str):
        is_whole = isinstance(value, int) and -_INT64 <= value < _INT64
        return torch.tensor(value, dtype=torch.int64 if is_whole else torch.float64)
    if "/" in value:
        raise ForeignFileError(f"{path} names the file {value!r}; expected one in {_TENSORS}")
    file = path.parent / _TENSORS / value
    if not file.is_file():
        raise ForeignFileError(f"{file} is not there, though dump.json names it: the dump was cut, or a file is lost")
    tensor = read_torch_file(file, inside=inside, what="a tensor of msprobe's", max_expanded_bytes=MAX_EXPANDED_BYTES)
    if not isinstance(tensor, torch.Tensor):
        raise ForeignFileError(f"{file} holds a {type(tensor).__name__}; expected a tensor")
    return tensor
