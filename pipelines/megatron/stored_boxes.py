"""Reads the tensors of a checkpoint's files: boxes of whole tensors, by canonical name.

Contract: ``{folder}/rank_00000.safetensors`` is a safetensors file. Its tensor ``parameter/decoder.x.weight@16,0`` is
the box of the whole tensor ``parameter/decoder.x.weight`` whose first element lies at ``[16, 0]``; its shape is its
own. The boxes of all files fill every whole tensor, each element once, whatever layout wrote them: so a rank of any
layout finds its own elements. No file says anything about ranks or layouts, and nothing in one is code.
Elements are copied and never computed with.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.files import Buffer
from mock_scheduler.support.tensor_bytes import as_bytes
from mock_scheduler.support.text import MAX_DIGITS
from mock_scheduler.trace.geometry import Rectangle, intersect, rectangles_of
from mock_scheduler.trace.shards import ShardSpec
from pipelines.megatron.file_seals import FileSeal, write_sealed

PARAMETER_KEY = "parameter"  # its whole tensors are parameter/{canonical name}

_PLACE = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}")
# Names of safetensors' own; parameters, Adam's state, buffers and random states have no other dtypes.
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTensor:
    """A tensor of this rank, of ``spec.local_shape``, under the key of the whole one: ``exp_avg/{canonical name}``."""

    key: str
    spec: ShardSpec
    tensor: torch.Tensor


# --- Writing ----------------------------------------------------------------------------------------------------------


def write_tensors(folder: Path, tensors: Sequence[LocalTensor], ranks: RankGroup) -> dict[str, FileSeal]:
    """Writes the boxes of all ranks, each box once; returns the seals of this rank's files by their names.

    Collective. Of several ranks that hold a box, the one with the fewest bytes so far writes it.

    Raises:
        OSError: the file cannot be written.
    """
    boxes = {
        _stored_name(local.key, box): values
        for local in tensors
        for box, values in rectangles_of(local.tensor.detach(), local.spec)
    }
    own = _choose_own({name: values.nbytes for name, values in boxes.items()}, ranks)
    if not own:
        return {}
    path = rank_path(folder, ranks.global_rank)
    return {path.name: write_sealed(path, encode_tensors({name: boxes[name].cpu() for name in own}))}


def rank_path(folder: Path, global_rank: int) -> Path:
    """Names the file of one rank."""
    return folder / f"rank_{global_rank:05d}.safetensors"


def _choose_own(sizes: Mapping[str, int], ranks: RankGroup) -> list[str]:
    """Shares out the boxes; every rank computes the same shares and returns its own."""
    holders: dict[str, list[int]] = {}
    all_sizes: dict[str, int] = {}
    for rank, part in enumerate(ranks.gather(json.dumps(sizes).encode())):
        for name, size in json.loads(part).items():
            holders.setdefault(name, []).append(rank)
            all_sizes[name] = size
    written = [0] * ranks.world_size
    own: list[str] = []
    for name in sorted(holders):
        writer = min(holders[name], key=lambda rank: (written[rank], rank))
        written[writer] += all_sizes[name]
        if writer == ranks.global_rank:
            own.append(name)
    return own


def encode_tensors(tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None) -> list[Buffer]:
    """Lays CPU tensors out as a safetensors file, in pieces that share their memory where they are contiguous."""
    # Widest first keeps every tensor aligned without gaps.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    start = 0
    for name in order:
        tensor = tensors[name]
        stop = start + tensor.nbytes
        dtype = _DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text = text.ljust(-(-len(text) // 8) * 8)
    return [len(text).to_bytes(8, "little") + text, *(as_bytes(tensors[name]).numpy().data for name in order)]


def _stored_name(key: str, box: Rectangle) -> str:
    return f"{key}@{','.join(map(str, box.origin))}"


# --- Reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredBox:
    """Holds a box of a whole tensor, and its place in a file."""

    box: Rectangle
    file: Any  # of safetensors, without annotations
    path: Path
    name: str


@dataclass(slots=True)
class StoredTensors:
    """Holds the tensors of several files, open as long as the block lasts."""

    paths: Sequence[Path]
    _boxes: dict[str, list[_StoredBox]] = field(default_factory=dict)
    _files: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> StoredTensors:
        for path in self.paths:
            try:
                file = self._files.enter_context(safe_open(path, framework="pt"))
                for name in file.keys():  # noqa: SIM118 - a file, not a mapping
                    key, box = _read_name(name, tuple(file.get_slice(name).get_shape()), path)
                    self._boxes.setdefault(key, []).append(_StoredBox(box=box, file=file, path=path, name=name))
            except (OSError, SafetensorError) as error:
                self._files.close()
                raise _unreadable(path, str(error)) from error
            except ConfigError:
                self._files.close()
                raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._boxes.clear()
        self._files.close()

    def read(self, key: str, spec: ShardSpec, dtype: torch.dtype) -> torch.Tensor:
        """Reads a rank's tensor of ``spec.local_shape``; 0 at places outside the whole tensor, as padding has them.

        Raises:
            ConfigError: the files have only a part of it, an element twice, or another tensor under its name.
        """
        local = torch.zeros(spec.local_shape, dtype=dtype)
        num_missing = 0
        for box, values in rectangles_of(local, spec):
            num_missing += box.num_elements - self._fill(key, box, values, spec)
        if num_missing:
            where = self.paths[0].parent if self.paths else "the checkpoint"
            raise _unreadable(where, f"{num_missing} of {math.prod(spec.local_shape)} elements of {key} are not there")
        return local

    def _fill(self, key: str, box: Rectangle, values: torch.Tensor, spec: ShardSpec) -> int:
        """Copies every stored part of a box; returns the number of its elements."""
        parts = [(stored, shared) for stored in self._boxes.get(key, []) if (shared := _share(stored, box, spec))]
        # One that is there twice would be counted in the place of one that is nowhere, which would stay 0.
        is_filled = torch.zeros(values.shape, dtype=torch.bool) if len(parts) > 1 else None
        for stored, shared in parts:
            if is_filled is not None:
                place = is_filled[slices_within(shared, box)]
                if place.any():
                    raise _unreadable(stored.path, f"elements of {stored.name} are there twice")
                place.fill_(True)
            _copy_shared(stored, shared, box, values)
        return sum(shared.num_elements for _, shared in parts)


def _read_name(name: str, shape: tuple[int, ...], path: Path) -> tuple[str, Rectangle]:
    key, _, text = name.rpartition("@")
    places = text.split(",") if text else []
    if not key or len(places) != len(shape) or not all(map(_PLACE.fullmatch, places)):
        raise _unreadable(path, f"the tensor {name!r} of shape {list(shape)} is no box of a whole one")
    return key, Rectangle(origin=tuple(map(int, places)), sizes=shape)


def _share(stored: _StoredBox, box: Rectangle, spec: ShardSpec) -> Rectangle | None:
    """Gives the part of a stored box that a rank's box needs; ``None`` for none."""
    ends = tuple(start + size for start, size in zip(stored.box.origin, stored.box.sizes, strict=True))
    if len(ends) != len(spec.global_shape) or any(
        end > size for end, size in zip(ends, spec.global_shape, strict=False)
    ):
        raise _unreadable(
            stored.path, f"{stored.name} of shape {list(stored.box.sizes)} is no part of {list(spec.global_shape)}"
        )
    return intersect(box, stored.box)


def _copy_shared(stored: _StoredBox, shared: Rectangle, box: Rectangle, values: torch.Tensor) -> None:
    """Copies the elements of a stored box that a rank's box shares."""
    try:
        content = stored.file.get_tensor(stored.name)
    except SafetensorError as error:
        raise _unreadable(stored.path, str(error)) from error
    if content.dtype != values.dtype:
        raise _unreadable(stored.path, f"{stored.name} is of {content.dtype}, this run has {values.dtype}")
    values[slices_within(shared, box)] = content[slices_within(shared, stored.box)]


def slices_within(shared: Rectangle, box: Rectangle) -> tuple[slice, ...]:
    """Returns where a part of a box lies in the box's own tensor."""
    starts = [start - first for start, first in zip(shared.origin, box.origin, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, shared.sizes, strict=True))


def _unreadable(where: object, why: str) -> ConfigError:
    return ConfigError(
        f"resume_from_checkpoint: {where} cannot be read, or is of another model: {why}\n"
        "Resume from another checkpoint."
    )
