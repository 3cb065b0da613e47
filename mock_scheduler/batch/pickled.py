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
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from mock_scheduler.support.raw_tensors import RawTensor

if TYPE_CHECKING:
    import torch

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
        return _build, (type(self), _carry(self._to_pickle()))

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


class _Carried:
    """A tensor on its way; a shallow copy takes it as it is."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        # NumPy knows bytes of any dtype as bytes, and gives them to the callback of protocol 5.
        from mock_scheduler.support.tensor_bytes import to_raw

        return _arrive, tuple(to_raw(self.tensor))


def _carry(value: object) -> object:
    if isinstance(value, dict):
        return {name: _carry(part) for name, part in value.items()}
    # Torch is there where a tensor is.
    import torch

    from mock_scheduler.support.tensor_bytes import has_plain_bytes

    # A subclass, as a parameter, has more to it than its values.
    is_plain = type(value) is torch.Tensor and has_plain_bytes(value) and value.is_cpu and not value.requires_grad
    return _Carried(value) if is_plain else value  # type: ignore[arg-type]


def _uncarry(value: Any) -> Any:  # noqa: ANN401 - a field, or a part of one
    if isinstance(value, dict):
        return {name: _uncarry(part) for name, part in value.items()}
    return value.tensor if isinstance(value, _Carried) else value


def _build(kind: type[PickledByBuffers], carried: Mapping[str, Any]) -> PickledByBuffers:
    return kind._from_pickle(_uncarry(carried))


def _arrive(content: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    from mock_scheduler.support.tensor_bytes import to_tensor

    return to_tensor(RawTensor(_own(content), dtype, shape))


class _Shown:
    """Read-only bytes for torch, which warns of an array that says so."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self.content = content  # keeps the store's memory
        self.__array_interface__ = {**content.__array_interface__, "data": (content.ctypes.data, False)}


def _own(content: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    if content.flags.writeable:
        return content
    return np.asarray(_Shown(content)) if _IS_IN_PLACE.get() else content.copy()
