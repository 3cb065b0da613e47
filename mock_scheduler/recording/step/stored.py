"""Stores one tensor in a step file: its safetensors name, dtype and shape, and its bytes.

Contract: bit for bit, for every dtype with plain storage. bool is packed bits, little endian, under
``{name}#bits``; a dtype that not every safetensors reader knows is bytes with one more dimension, of the item's size,
under ``{name}#{dtype}``; every other tensor is stored as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.support.tensor_bytes import as_bytes, dtype_name

_SAFETENSORS_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
}
_NUMPY_DTYPES: Mapping[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
}


class TensorEntry(NamedTuple):  # every open makes some dozens, and a data class takes several times as long
    """A tensor of a step file. ``start`` and ``stop``: where its stored bytes lie in the file; ``blocks``: the SHA-256
    (hex) of its blocks, one after another."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: str
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Stored bytes."""
        return self.stop - self.start

    @property
    def bits_per_entry(self) -> int:
        """Stored bits of one entry along the first dimension."""
        return math.prod(self.shape[1:]) * (1 if self.dtype is torch.bool else 8 * self.dtype.itemsize)

    def byte_range(self, entries: range) -> tuple[int, int]:
        """The tensor's bytes holding these entries along the first dimension, as start and stop."""
        num_bits = self.bits_per_entry
        return entries.start * num_bits // 8, -(-entries.stop * num_bits // 8)


def count_stored_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """How many bytes a tensor takes in the file."""
    count = math.prod(shape)
    return -(-count // 8) if dtype is torch.bool else count * dtype.itemsize


def stored_form(entry: TensorEntry) -> tuple[str, str, list[int]]:
    """The name, dtype and shape that any safetensors reader sees."""
    if entry.dtype is torch.bool:
        return f"{entry.name}#bits", "U8", [entry.size_bytes]
    if entry.dtype in _SAFETENSORS_DTYPES:
        return entry.name, _SAFETENSORS_DTYPES[entry.dtype], list(entry.shape)
    return f"{entry.name}#{dtype_name(entry.dtype)}", "U8", [*entry.shape, entry.dtype.itemsize]


def stored_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes to store, as a view of the tensor where it is contiguous and not bool."""
    if tensor.dtype is torch.bool:
        return np.packbits(tensor.detach().numpy().reshape(-1), bitorder="little").data
    return as_bytes(tensor.detach()).numpy().data


def view_array(data: memoryview, entry: TensorEntry, *, entries: range | None = None) -> npt.NDArray[Any]:
    """``view_tensor`` as an array, of a dtype that NumPy has: for small tensors several times faster than a tensor."""
    if entry.dtype is torch.bool or not data:
        return view_tensor(data, entry, entries=entries).numpy()
    array = np.frombuffer(data, dtype=_NUMPY_DTYPES[entry.dtype])
    return array if len(entry.shape) == 1 else array.reshape(-1, *entry.shape[1:])


def view_tensor(data: memoryview, entry: TensorEntry, *, entries: range | None = None) -> torch.Tensor:
    """The tensor, or ``entries`` of it along the first dimension, from its ``byte_range``: a view, except for bool."""
    shape = entry.shape if entries is None else (len(entries), *entry.shape[1:])
    count = math.prod(shape)
    if count == 0:
        return torch.empty(0, dtype=torch.uint8).view(entry.dtype).reshape(shape)
    if entry.dtype is torch.bool:
        skipped = 0 if entries is None else entries.start * entry.bits_per_entry % 8
        bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=skipped + count, bitorder="little")
        return torch.from_numpy(bits[skipped:].view(np.bool_)).reshape(shape)
    tensor = torch.frombuffer(data, dtype=entry.dtype)
    return tensor if len(shape) == 1 else tensor.reshape(shape)
