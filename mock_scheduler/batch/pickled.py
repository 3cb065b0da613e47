"""Carries tensors through pickle as NumPy does its arrays: out of band where a buffer callback takes them.

Contract: bit for bit, for every dtype of ``DTYPES``, and of a view its own values alone. What arrives may be written
to, and no write reaches a store that others read: bytes that are read only are copied, but for a reader that asks for
them in place (``in_place``). Buffers that may be written to are the reader's own, as for NumPy. Other tensors, as
sparse ones, go the way of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.support.tensor_bytes import as_bytes, dtype_name, find_dtype, from_bytes, has_plain_bytes

_IS_IN_PLACE: ContextVar[bool] = ContextVar("batches_in_place", default=False)


@contextmanager
def in_place() -> Iterator[None]:
    """Within it, batches that this thread unpickles show the bytes of a store where they lie, and copy none.

    For a reader that writes to no tensor of theirs: torch knows no read-only tensor, and Ray maps its store for
    writing, so that a write would change the batch of every process of the node.
    """
    token = _IS_IN_PLACE.set(True)
    try:
        yield
    finally:
        _IS_IN_PLACE.reset(token)


class PickledByBuffers:
    """A dataclass of tensors and other values, whose tensors torch would pickle as bytes within the stream."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        tensors: list[torch.Tensor] = []
        return _restore, (_take_apart(self, tensors), *map(_Carried, tensors))

    def _to_pickle(self) -> dict[str, Any]:
        """The fields by name, as they are to be carried."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def _from_pickle(cls, carried: Mapping[str, Any]) -> Self:
        """The object of ``_to_pickle``'s fields, which were checked when it was made."""
        made = object.__new__(cls)
        for name, value in carried.items():
            object.__setattr__(made, name, value)
        return made


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor's place, by its number among all of the object."""

    number: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """An object in parts."""

    kind: type[PickledByBuffers]
    carried: Mapping[str, Any]


class _Carried:
    """A tensor on its way."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        # NumPy knows bytes of any dtype as bytes, and gives them to the callback of protocol 5.
        return _Arrived, (
            as_bytes(self.tensor).numpy(),
            dtype_name(self.tensor.dtype),
            tuple(self.tensor.shape),
        )


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A tensor that came, as bytes that others may hold too."""

    content: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]


def _take_apart(value: object, tensors: list[torch.Tensor]) -> object:
    """Notes the tensors in ``tensors``, and gives what remains."""
    if isinstance(value, PickledByBuffers):
        return _Parts(type(value), {name: _take_apart(part, tensors) for name, part in value._to_pickle().items()})
    if isinstance(value, dict):
        return {name: _take_apart(part, tensors) for name, part in value.items()}
    # A subclass, as a parameter, has more to it than its values.
    if type(value) is not torch.Tensor or not has_plain_bytes(value) or not value.is_cpu or value.requires_grad:
        return value
    tensors.append(value)
    return _Place(len(tensors) - 1)


def _put_together(value: object, tensors: list[torch.Tensor]) -> object:
    if isinstance(value, _Place):
        return tensors[value.number]
    if isinstance(value, dict):
        return {name: _put_together(part, tensors) for name, part in value.items()}
    if not isinstance(value, _Parts):
        return value
    return value.kind._from_pickle({name: _put_together(part, tensors) for name, part in value.carried.items()})


def _restore(parts: object, *carried: _Carried | _Arrived) -> object:
    came = [one for one in carried if isinstance(one, _Arrived)]
    if not came:  # a shallow copy, which shares its tensors
        return _put_together(parts, [one.tensor for one in carried if isinstance(one, _Carried)])
    return _put_together(parts, [from_bytes(_own(one.content), find_dtype(one.dtype), one.shape) for one in came])


class _Shown:
    """Read-only bytes for torch, which warns of an array that says so."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self.content = content  # keeps the store's memory
        self.__array_interface__ = {**content.__array_interface__, "data": (content.ctypes.data, False)}


def _own(content: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    if content.flags.writeable:
        return content
    return np.asarray(_Shown(content)) if _IS_IN_PLACE.get() else content.copy()
