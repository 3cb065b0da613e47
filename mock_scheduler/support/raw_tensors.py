"""Holds tensors as bytes with a dtype's name and a shape, for who reads them without torch, which takes long to import.

Contract: bit for bit, for every dtype of ``ITEM_SIZES``; ``tensor_bytes`` turns them into tensors and back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mock_scheduler.support.text import shorten

#: The dtypes that a file may hold, by torch's name -> bytes of a value. Quantised dtypes end the process that reads
#: their bytes as values, and torch can do nothing with ``bits*`` or with integers of less than a byte.
ITEM_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),  # torch 2.6 lacks these two
}
_NO_NUMPY = frozenset(("bfloat16", "complex32"))


class RawTensor(NamedTuple):
    """A tensor on the CPU. ``content``: the bytes of its values, uint8 ``[num_bytes]``; ``dtype``: torch's name."""

    content: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of_array(cls, array: npt.NDArray[Any]) -> RawTensor:
        """Shares the memory of an array, where that is contiguous."""
        return cls(np.ascontiguousarray(array).reshape(-1).view(np.uint8), array.dtype.name, array.shape)

    @classmethod
    def join(cls, raws: Sequence[RawTensor]) -> RawTensor:
        """Copies several of one dtype and trailing shape one after another, along the first dimension."""
        first = raws[0]
        content = np.concatenate([raw.content for raw in raws])
        return cls(content, first.dtype, (sum(raw.shape[0] for raw in raws), *first.shape[1:]))

    @property
    def entry_bytes(self) -> int:
        """Counts bytes of one entry along the first dimension."""
        return ITEM_SIZES[self.dtype] * math.prod(self.shape[1:])

    def array(self) -> npt.NDArray[Any] | None:
        """Returns an array that shares its memory; ``None`` for a dtype that NumPy does not have."""
        if self.dtype in _NO_NUMPY or self.dtype.startswith(("float8", "float4")):
            return None
        return self.content.view(self.dtype).reshape(self.shape)

    def copy(self) -> RawTensor:
        """Returns an equal one with memory of its own."""
        return self._replace(content=self.content.copy())

    def digest(self) -> str:
        """Returns SHA-256 (hex) over its type and shape, as in ``int32[2, 3]``, and then its bytes."""
        digest = hashlib.sha256(f"{self.dtype}{list(self.shape)}".encode())
        digest.update(self.content.data)
        return digest.hexdigest()


def unknown_dtype_text(name: object) -> str:
    """Says, going on from the tensor's name, that no file may hold the dtype of this name."""
    import torch

    return f"is of dtype {shorten(repr(name), 40)}, which torch {torch.__version__} does not have, or no file may hold"


def bool_problem(tensor: RawTensor) -> str:
    """Why a tensor of bool cannot be recorded as bits; empty where it can, and for any other dtype."""
    if tensor.dtype == "bool" and (most := int(tensor.content.max(initial=0))) > 1:
        return f"it is bool with a byte of {most}; expected 0 and 1, as bits are recorded"
    return ""
