"""Fields of tensors that may be given as arrays, and become tensors when somebody asks for one.

Contract: what was read from a file is looked at without torch, which takes a second and more to import. The tensor
shares the memory of what was given, and is made once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mock_scheduler.support.raw_tensors import RawTensor

if TYPE_CHECKING:
    import torch

Given: TypeAlias = "torch.Tensor | npt.NDArray[Any] | RawTensor"
"""What such a field may be given."""


class _TensorField:
    """Gives the tensor of a field; as a class attribute, it is the default of an optional one."""

    def __init__(self, *, is_optional: bool) -> None:
        self._is_optional = is_optional

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._tensor_name = name, f"_{name}"

    def __get__(self, instance: object, owner: type) -> torch.Tensor | None:
        if instance is None:
            if self._is_optional:
                return None
            raise AttributeError(self._name)  # so a dataclass sees no default
        known = instance.__dict__
        found: torch.Tensor | None = known.get(self._tensor_name)
        if found is None and known[self._name] is not None:
            found = known[self._tensor_name] = make_tensor(known[self._name])
        return found

    def __set__(self, instance: object, value: Given | None) -> None:
        instance.__dict__[self._name] = value


def tensor_field(*, is_optional: bool = False) -> Any:  # noqa: ANN401 - the default of a field of any type
    """Declares such a field of a dataclass without slots; an optional one is ``None`` by default."""
    return _TensorField(is_optional=is_optional)


def given(instance: object, name: str) -> Any:  # noqa: ANN401 - ``Given``, as the caller knows
    """Returns what a field was given."""
    return instance.__dict__[name]


def as_array(value: torch.Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns an array that shares the memory of what a field was given."""
    return value if isinstance(value, np.ndarray) else value.numpy()


def as_raw(value: torch.Tensor | RawTensor) -> RawTensor:
    """Returns the bytes of what a field was given."""
    if isinstance(value, RawTensor):
        return value
    from mock_scheduler.support.tensor_bytes import to_raw

    return to_raw(value)


def copy_given(value: Given) -> Given:
    """Returns an equal one with memory of its own."""
    return value.copy() if isinstance(value, np.ndarray | RawTensor) else value.clone()


def make_tensor(value: Given) -> torch.Tensor:
    """Returns a tensor that shares the memory of what a field was given."""
    if not isinstance(value, np.ndarray | RawTensor):
        return value
    from mock_scheduler.support.tensor_bytes import share_array, to_tensor

    return to_tensor(value) if isinstance(value, RawTensor) else share_array(value)
