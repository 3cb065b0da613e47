"""The tokens of a step's files by sample and position, whatever ranks, micro-batches and padding they were in.

Contract: cells of padding are in no table. A file without ``sample_ids`` (another system's) has no table, and is paired
by rank and micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.adapters.nexrl.files import Content, as_number, load_content
from mock_scheduler.adapters.nexrl.names import DumpKind, FileKey, find_files
from mock_scheduler.errors import TraceError

_MASKS = ("response_mask", "effective_valid", "loss_mask")
_POSITION_BITS = 32

_Keys = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DumpFile:
    """One file of a step. keys: int64, of each cell that is no padding; cells: int64, where it lies in the flattened
    tensors. mask: bool, of these cells. All None where the file does not say whose tokens it holds."""

    key: FileKey
    path: Path
    content: Content
    keys: _Keys | None = None
    cells: _Keys | None = None
    mask: npt.NDArray[np.bool_] | None = None

    @property
    def has_identities(self) -> bool:
        """Whether its tokens are known by sample and position."""
        return self.keys is not None

    def masked_keys(self) -> _Keys:
        """Keys of the tokens with defined values, ascending; none where tokens are not known."""
        if self.keys is None or self.mask is None:
            return np.empty(0, dtype=np.int64)
        return np.sort(self.keys[self.mask])

    def values(self, name: str) -> torch.Tensor | None:
        """1-D, of the cells that are no padding; None where the file has no such tensor of all its cells."""
        tensor = as_tensor(self.content.get(name))
        if tensor is None or self.cells is None or tensor.numel() != as_size(self.content["sample_index"]):
            return None
        return tensor.reshape(-1)[torch.from_numpy(self.cells)]

    def flat_mask(self, size: int) -> torch.Tensor | None:
        """bool ``[size]``: where values are defined, in a file without identities; None where it does not say."""
        for name in _MASKS:
            mask = as_tensor(self.content.get(name))
            if mask is not None and mask.numel() == size:
                return mask.reshape(-1) != 0
        return None


class SampleNumbers:
    """Numbers samples by their ids, for the files of both sides."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._ids: list[str] = []

    def number(self, sample_id: str) -> int:
        """The same for equal ids."""
        if sample_id not in self._numbers:
            self._numbers[sample_id] = len(self._ids)
            self._ids.append(sample_id)
        return self._numbers[sample_id]

    def describe(self, key: int) -> str:
        """``default/group 0/episode 0/env 1/turn 0, token 7``."""
        return f"{self._ids[key >> _POSITION_BITS]}, token {key & ((1 << _POSITION_BITS) - 1)}"


def as_tensor(value: object) -> torch.Tensor | None:
    """A dense real tensor of a file, or a list of numbers (floats as float64); None for anything else.

    In a list the texts ``NaN``, ``Infinity`` and ``-Infinity`` are numbers, as ``.jsonl`` writes them.
    """
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and not value.is_complex() and not value.is_quantized
        return value.detach() if is_plain else None
    if not isinstance(value, list):
        return None
    try:
        # Not by torch.tensor(value), which takes float32 for Python's floats.
        return torch.from_numpy(np.array(_as_numbers(value)))
    except (TypeError, ValueError, OverflowError):
        return None


def as_pair(one: object, other: object) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Both as tensors; where just one of them is a list, without a dtype, both as float64 or as int64."""
    first, second = as_tensor(one), as_tensor(other)
    if first is None or second is None or isinstance(one, list) == isinstance(other, list):
        return first, second
    return as_one_kind(first, second)


def as_one_kind(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers as int64, and float64 where one side has floats: masks are of bools, numbers or floats."""
    if first.is_floating_point() or second.is_floating_point():
        return first.double(), second.double()
    return first.long(), second.long()


def _as_numbers(value: list[Any]) -> list[Any]:
    return [
        _as_numbers(item) if isinstance(item, list) else as_number(item) if isinstance(item, str) else item
        for item in value
    ]


def as_size(value: object) -> int:
    """Elements of a tensor or list; 0 for anything else."""
    tensor = as_tensor(value)
    return 0 if tensor is None else tensor.numel()


def load_files(dump_dir: Path, kind: DumpKind, step: int, samples: SampleNumbers) -> dict[FileKey, DumpFile]:
    """All files of a kind and step, by their keys; raises ``TraceError`` as ``load_content``."""
    return {
        key: _index(key, path, load_content(path, inside=dump_dir), samples)
        for key, path in find_files(dump_dir, kind).items()
        if key.step == step
    }


def _index(key: FileKey, path: Path, content: Content, samples: SampleNumbers) -> DumpFile:
    ids, index, positions = (content.get(name) for name in ("sample_ids", "sample_index", "positions"))
    sample_index, token_positions = as_tensor(index), as_tensor(positions)
    plain = DumpFile(key=key, path=path, content=content)
    if not isinstance(ids, list) or sample_index is None or token_positions is None:
        return plain
    if sample_index.shape != token_positions.shape:
        return plain
    mask = plain.flat_mask(sample_index.numel())
    if mask is None:
        return plain
    # By torch, since NumPy lacks some of its dtypes.
    flat = sample_index.reshape(-1).long().numpy()
    if flat.max(initial=-1) >= len(ids):
        raise TraceError(f"{path}: sample_index has {flat.max()}, and sample_ids has {len(ids)} entries")
    cells = np.flatnonzero(flat >= 0)
    numbers = np.array([samples.number(str(sample)) for sample in ids] or [0], dtype=np.int64)
    places = token_positions.reshape(-1).long().numpy()[cells]
    if len(places) and not 0 <= places.min() <= places.max() < 1 << _POSITION_BITS:
        raise TraceError(
            f"{path}: positions are {places.min()} to {places.max()}; expected 0 to {2**_POSITION_BITS - 1}"
        )
    keys = (numbers[flat[cells]] << _POSITION_BITS) + places
    return DumpFile(key=key, path=path, content=content, keys=keys, cells=cells, mask=mask.numpy()[cells])


class TokenTable:
    """All tokens of some files of one update, by key."""

    def __init__(self, files: Iterable[DumpFile]) -> None:
        self._files: Sequence[DumpFile] = [file for file in files if file.has_identities]
        parts = [file.keys for file in self._files if file.keys is not None]
        masks = [file.mask for file in self._files if file.mask is not None]
        keys = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        self._order = np.argsort(keys, kind="stable")
        sizes = [len(part) for part in parts]
        self._file_of = np.repeat(np.arange(len(sizes)), sizes)[self._order]
        self._place_of = np.concatenate([np.empty(0, dtype=np.int64), *map(np.arange, sizes)])[self._order]
        self.keys: _Keys = keys[self._order]
        self.mask: npt.NDArray[np.bool_] = np.concatenate([np.empty(0, dtype=np.bool_), *masks])[self._order]

    @property
    def doubled(self) -> _Keys:
        """Keys present more than once."""
        return np.unique(self.keys[1:][self.keys[1:] == self.keys[:-1]])

    def find(self, keys: _Keys) -> tuple[_Keys, npt.NDArray[np.bool_]]:
        """The place of each key in the table, and whether it is there at all."""
        if not len(self.keys):
            return np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=np.bool_)
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return places, self.keys[places] == keys

    def values(self, name: str, places: _Keys) -> torch.Tensor | None:
        """1-D, at these places of the table; None where a file holding one of the given tokens has no such values.

        In the dtype of the files holding them, whatever others have; float64 where they are of several.
        """
        numbers = self._file_of[places]
        parts: list[torch.Tensor] = []
        for number in np.unique(numbers):
            values = self._files[int(number)].values(name)
            if values is None:
                return None
            parts.append(values[torch.from_numpy(self._place_of[places][numbers == number])])
        if len({part.dtype for part in parts}) > 1:
            parts = [part.double() for part in parts]
        back = np.argsort(np.argsort(numbers, kind="stable"), kind="stable")
        return torch.cat(parts)[torch.from_numpy(back)] if parts else None


def by_update(files: Mapping[FileKey, DumpFile]) -> dict[int, list[DumpFile]]:
    """The files of each optimizer update of the step, in order."""
    grouped: dict[int, list[DumpFile]] = {}
    for key, file in files.items():
        grouped.setdefault(key.update, []).append(file)
    return dict(sorted(grouped.items()))
