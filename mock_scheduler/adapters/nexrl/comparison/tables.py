"""The tokens of a step's files by sample and position, whatever ranks, micro-batches and padding they were in.

Contract: cells of padding are in no table. A file without ``sample_ids`` (another system's) has no table, and is paired
by rank and micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.adapters.nexrl.files import Content, load_content
from mock_scheduler.adapters.nexrl.names import DumpKind, FileKey, find_files

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
        """Keys of the tokens at which values are defined, ascending; none where tokens are not known."""
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
    """A tensor of a file, or of a list of numbers, which has no dtype of its own; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, list):
        return None
    try:
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def as_size(value: object) -> int:
    """Elements of a tensor or list; 0 for anything else."""
    tensor = as_tensor(value)
    return 0 if tensor is None else tensor.numel()


def load_files(dump_dir: Path, kind: DumpKind, step: int, samples: SampleNumbers) -> dict[FileKey, DumpFile]:
    """All files of a kind and step, by what they are of; raises ``TraceError`` as ``load_content``."""
    return {
        key: _index(key, path, load_content(path), samples)
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
    flat = sample_index.reshape(-1).numpy().astype(np.int64)
    cells = np.flatnonzero(flat >= 0)
    numbers = np.array([samples.number(str(sample)) for sample in ids] or [0], dtype=np.int64)
    keys = (numbers[flat[cells]] << _POSITION_BITS) + token_positions.reshape(-1).numpy().astype(np.int64)[cells]
    return DumpFile(key=key, path=path, content=content, keys=keys, cells=cells, mask=mask.numpy()[cells])


class TokenTable:
    """All tokens of some files of one update, by key."""

    def __init__(self, files: Iterable[DumpFile]) -> None:
        self._files: Sequence[DumpFile] = [file for file in files if file.has_identities]
        parts = [file.keys for file in self._files if file.keys is not None]
        masks = [file.mask for file in self._files if file.mask is not None]
        keys = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        self._order = np.argsort(keys, kind="stable")
        self.keys: _Keys = keys[self._order]
        self.mask: npt.NDArray[np.bool_] = np.concatenate([np.empty(0, dtype=np.bool_), *masks])[self._order]

    @property
    def doubled(self) -> _Keys:
        """Keys that are there more than once."""
        return np.unique(self.keys[1:][self.keys[1:] == self.keys[:-1]])

    def find(self, keys: _Keys) -> tuple[_Keys, npt.NDArray[np.bool_]]:
        """The place of each key in the table, and whether it is there at all."""
        if not len(self.keys):
            return np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=np.bool_)
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return places, self.keys[places] == keys

    def values(self, name: str) -> torch.Tensor | None:
        """1-D, in the table's order; None where a file that holds any token has no such values."""
        parts = [file.values(name) for file in self._files if file.keys is not None and len(file.keys)]
        if not parts or any(part is None for part in parts):
            return None
        joined = torch.cat([part for part in parts if part is not None])
        return joined[torch.from_numpy(self._order)]


def by_update(files: Mapping[FileKey, DumpFile]) -> dict[int, list[DumpFile]]:
    """The files of each optimizer update of the step, in order."""
    grouped: dict[int, list[DumpFile]] = {}
    for key, file in files.items():
        grouped.setdefault(key.update, []).append(file)
    return dict(sorted(grouped.items()))
