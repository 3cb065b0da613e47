"""Keeps any plain value of a framework, tensors and arrays within it too, as JSON and bytes, and gives it back.

Contract: ``unpack(*pack(value))`` is the value, with every type and every bit (NaN payloads, -0.0, tuples, NumPy
scalars, tensors of any dtype). Short things stay readable JSON. What JSON cannot say is a mapping with one key that
begins with ``$``: long lists of numbers, bytes, tensors and arrays lie in the bytes, at the place that it names.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from mock_scheduler.errors import BatchError
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.tensor_bytes import (
    as_bytes,
    dtype_name,
    find_dtype,
    from_bytes,
    has_plain_bytes,
    shape_text,
)
from mock_scheduler.support.text import shorten

#: Lists of so many numbers lie in the bytes.
_MANY = 16
_INT64 = 2**63
_ARRAY_DTYPE = re.compile(r"[<>|=]?(?:[biuf](?:1|2|4|8)|c(?:8|16)|[US]\d{1,6})")
_MAX_DEPTH = 100


class _Packer:
    def __init__(self) -> None:
        self.content = bytearray()

    def pack(self, value: object, place: str, depth: int = 0) -> JSON:
        if value is None or type(value) in (bool, str):
            return value  # type: ignore[return-value]
        if type(value) is int:
            return value if -_INT64 <= value < _INT64 else {"$int": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if depth > _MAX_DEPTH:
            raise BatchError(f"{place} lies in itself, or more than {_MAX_DEPTH} deep")
        if type(value) is list:
            return self._pack_list(value, place, depth)
        if isinstance(value, Mapping):
            return self._pack_dict(value, place, depth)
        if type(value) is tuple or isinstance(value, torch.Size):
            tag = "$tuple" if type(value) is tuple else "$size"
            return {tag: [self.pack(item, f"{place}[{number}]", depth + 1) for number, item in enumerate(value)]}
        if type(value) in (bytes, bytearray):
            return {f"${type(value).__name__}": self._put(bytes(value))}  # type: ignore[call-overload]
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(value, place)
        if type(value) is np.ndarray:  # masks and units of others would be lost
            return self._pack_array(value, place, depth)
        if isinstance(value, np.generic) and _ARRAY_DTYPE.fullmatch(value.dtype.str):
            return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
        kind = type(value)
        raise BatchError(
            f"{place} is a {kind.__module__}.{kind.__qualname__}, which a recording cannot keep; expected plain "
            "values, tensors and arrays"
        )

    def _put(self, content: bytes) -> JSON:
        start = len(self.content)
        self.content += content
        return [start, len(content)]

    def _pack_list(self, items: list[Any], place: str, depth: int) -> JSON:
        kinds = set(map(type, items))
        if len(items) >= _MANY and kinds == {int} and min(items) >= -_INT64 and max(items) < _INT64:
            return {"$ints": self._put(np.array(items, dtype="<i8").tobytes())}
        if len(items) >= _MANY and kinds == {float}:
            return {"$floats": self._put(struct.pack(f"<{len(items)}d", *items))}
        return [self.pack(item, f"{place}[{number}]", depth + 1) for number, item in enumerate(items)]

    def _pack_dict(self, items: Mapping[Any, Any], place: str, depth: int) -> JSON:
        if type(items) is not dict:
            raise BatchError(f"{place} is a {type(items).__name__}, which a recording cannot keep; expected a dict")
        packed: list[list[JSON]] = [
            [self.pack(key, f"a key of {place}", depth + 1), self.pack(item, f"{place}.{_shown(key)}", depth + 1)]
            for key, item in items.items()
        ]
        # A recording sorts the keys of its JSON.
        if all(type(key) is str and not key.startswith("$") for key in items) and list(items) == sorted(items):
            return {str(key): item for key, item in packed}
        return {"$dict": packed}

    def _pack_tensor(self, tensor: torch.Tensor, place: str) -> JSON:
        if not has_plain_bytes(tensor):
            raise BatchError(f"{place} is {shape_text(tensor)}; expected a dense tensor of plain numbers")
        content = as_bytes(tensor.detach().cpu()).numpy().tobytes()
        return {"$tensor": [dtype_name(tensor.dtype), list(tensor.shape), self._put(content)]}

    def _pack_array(self, array: np.ndarray[Any, Any], place: str, depth: int) -> JSON:
        if array.dtype == object:
            items = [self.pack(item, f"{place}[{number}]", depth + 1) for number, item in enumerate(array.flat)]
            return {"$objects": [list(array.shape), items]}
        if not _ARRAY_DTYPE.fullmatch(array.dtype.str):
            raise BatchError(f"{place} is an array of dtype {array.dtype}; expected numbers, bools, texts or objects")
        return {"$array": [array.dtype.str, list(array.shape), self._put(array.tobytes())]}


def _shown(key: object) -> str:
    return shorten(str(key), 40)


def pack(value: object, place: str, content: bytearray | None = None) -> tuple[JSON, bytearray]:
    """Packs a value; ``content``: bytes of values before it, to which its own are added.

    Raises:
        BatchError: a value is none that can be kept; the message begins with ``place``.
    """
    packer = _Packer()
    if content is not None:
        packer.content = content
    return packer.pack(value, place), packer.content


def unpack(packed: JSON, content: bytes) -> Any:  # noqa: ANN401 - the framework's
    """Gives the value again.

    Raises:
        BatchError: it was not made by ``pack``.
    """
    try:
        return _unpack(packed, content)
    except (ValueError, TypeError, KeyError, IndexError, struct.error, RuntimeError, OverflowError) as error:
        if isinstance(error, BatchError):
            raise
        raise BatchError(f"{shorten(str(packed), 80)} is no packed value: {error}") from error


def _unpack(packed: Any, content: bytes) -> Any:  # noqa: ANN401 - the framework's
    if isinstance(packed, list):
        return [_unpack(item, content) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) == 1:
        ((tag, item),) = packed.items()
        if tag in _UNPACKERS:
            return _UNPACKERS[tag](item, content)
    return {key: _unpack(item, content) for key, item in packed.items()}


def _take(place: Any, content: bytes) -> bytes:  # noqa: ANN401 - JSON
    start, count = place
    if not 0 <= start <= start + count <= len(content):
        raise BatchError(f"a packed value lies at bytes {start} to {start + count} of {len(content)}")
    return content[start : start + count]


def _take_tensor(item: Any, content: bytes) -> torch.Tensor:  # noqa: ANN401 - JSON
    name, shape, place = item
    dtype = find_dtype(name)
    taken = np.frombuffer(bytearray(_take(place, content)), dtype=np.uint8)
    if len(taken) != math.prod(shape) * dtype.itemsize:
        raise BatchError(f"a packed tensor {name} {shape} has {len(taken)} bytes")
    return from_bytes(taken, dtype, shape)


def _take_array(item: Any, content: bytes) -> np.ndarray[Any, Any]:  # noqa: ANN401 - JSON
    name, shape, place = item
    if not _ARRAY_DTYPE.fullmatch(name):
        raise BatchError(f"a packed array is of dtype {shorten(name, 40)!r}")
    return np.frombuffer(bytearray(_take(place, content)), dtype=name).reshape(shape)


def _take_objects(item: Any, content: bytes) -> np.ndarray[Any, Any]:  # noqa: ANN401 - JSON
    shape, items = item
    array = np.empty(len(items), dtype=object)
    for number, one in enumerate(items):  # by number: NumPy would take lists apart
        array[number] = _unpack(one, content)
    return array.reshape(shape)


def _take_scalar(item: Any, _content: bytes) -> np.generic:  # noqa: ANN401 - JSON
    name, digits = item
    content = bytes.fromhex(digits)
    if np.dtype(name).kind not in "SU":
        return cast("np.generic", np.frombuffer(content, dtype=name)[0])
    # NumPy's buffers end a text at its last character that is not zero.
    content = content[: np.dtype(name).itemsize]
    return np.bytes_(content) if "S" in name else np.str_(content.decode("utf-32-le", "surrogatepass"))


def _take_floats(place: Any, content: bytes) -> list[float]:  # noqa: ANN401 - JSON
    taken = _take(place, content)
    return list(struct.unpack(f"<{len(taken) // 8}d", taken))


_UNPACKERS: Mapping[str, Callable[[Any, bytes], Any]] = {
    "$int": lambda item, _content: int(item, 16),
    "$float": lambda item, _content: struct.unpack(">d", bytes.fromhex(item))[0],
    "$tuple": lambda item, content: tuple(_unpack(one, content) for one in item),
    "$dict": lambda item, content: {_unpack(key, content): _unpack(one, content) for key, one in item},
    "$size": lambda item, content: torch.Size(_unpack(one, content) for one in item),
    "$bytes": _take,
    "$bytearray": lambda item, content: bytearray(_take(item, content)),
    "$ints": lambda item, content: np.frombuffer(_take(item, content), dtype="<i8").tolist(),
    "$floats": _take_floats,
    "$scalar": _take_scalar,
    "$tensor": _take_tensor,
    "$array": _take_array,
    "$objects": _take_objects,
}
