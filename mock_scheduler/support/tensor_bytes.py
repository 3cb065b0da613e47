"""Turns tensors into bytes and back, and names dtypes: the one place where either is told.

Contract: bit for bit, for every dtype of ``DTYPES``; nothing is converted. Callers refuse tensors without bytes of
their own, by ``has_plain_bytes``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.support.raw_tensors import ITEM_SIZES, RawTensor, bool_problem, unknown_dtype_text


def dtype_name(dtype: torch.dtype) -> str:
    """Returns ``int32`` for ``torch.int32``."""
    return str(dtype).removeprefix("torch.")


#: Name, as ``int32`` -> dtype, of those that a file may hold.
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES if hasattr(torch, name)}
_STORED_DTYPES = frozenset(DTYPES.values())


def find_dtype(name: object) -> torch.dtype:
    """Gives the dtype of this name; raises ``ValueError`` that goes on from the tensor's, where no file may hold it."""
    found = DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(unknown_dtype_text(name))
    return found


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense and holds values of a stored dtype: not sparse, nested, quantised or of ``meta``."""
    is_dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    return is_dense and tensor.dtype in _STORED_DTYPES


_BIT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def view_as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width and shape: equal where, and only where, the bits are equal."""
    return tensor.view(_BIT_DTYPES[tensor.element_size()])


_MEMCMP = ctypes.CDLL(None).memcmp
_MEMCMP.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def have_equal_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the values of two CPU tensors have equal bytes, whatever their shapes."""
    if left.nbytes != right.nbytes:
        return False
    left, right = left.contiguous(), right.contiguous()
    # Twice as fast as torch.equal: it looks at no element, and ends at the first byte that differs.
    return not left.nbytes or not _MEMCMP(left.data_ptr(), right.data_ptr(), left.nbytes)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a CPU tensor's values, uint8 ``[num_bytes]``, as a view where it is contiguous."""
    if tensor.numel() == 0:  # which torch cannot always view as another dtype
        return torch.empty(0, dtype=torch.uint8)
    # Lazy conjugation and negation are flags beside the bytes: they are carried out first.
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # One element of an expanded tensor counts as contiguous whatever its stride, which a view does not accept.
    return (flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def from_bytes(content: npt.NDArray[np.uint8], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Make the tensor on the given bytes, without a copy; the inverse of ``as_bytes``."""
    if len(content) == 0:  # which torch cannot view as another dtype
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(content).view(dtype).reshape(tuple(shape))


def to_raw(tensor: torch.Tensor) -> RawTensor:
    """The tensor as bytes, which share its memory where it is contiguous."""
    return RawTensor(as_bytes(tensor).numpy(), dtype_name(tensor.dtype), tuple(tensor.shape))


def to_tensor(raw: RawTensor) -> torch.Tensor:
    """Make the tensor that shares these bytes; raises ``ValueError`` where torch does not have the dtype."""
    return from_bytes(raw.content, find_dtype(raw.dtype), raw.shape)


def share_array(array: npt.NDArray[Any]) -> torch.Tensor:
    """The tensor that shares an array's memory; an empty one has strides torch can work with."""
    tensor = torch.from_numpy(array)
    return tensor if array.size else torch.empty(array.shape, dtype=tensor.dtype)


def tensor_problem(tensor: torch.Tensor) -> str:
    """Why a tensor cannot be recorded bit for bit; empty where it can."""
    if not has_plain_bytes(tensor) or not tensor.is_cpu:
        return f"expected a dense CPU tensor; it is {shape_text(tensor)}"
    if tensor.requires_grad:
        return "it requires grad, which a recording cannot keep: detach it"
    return bool_problem(to_raw(tensor))


def shape_text(tensor: torch.Tensor) -> str:
    """A tensor as messages name it: ``torch.float32 [2, 3] on cpu``; one that has no plain shape by its layout."""
    if tensor.is_nested:
        return f"a nested tensor of {tensor.dtype}"
    layout = "" if tensor.layout is torch.strided else f", {tensor.layout}"
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}{layout}"


def compute_tensor_digest(tensor: torch.Tensor) -> str:
    """Returns SHA-256 (hex) of a CPU tensor, over its type and shape as in ``int32[2, 3]`` and then its bytes."""
    return to_raw(tensor).digest()
