"""Python values of a framework, tensors and arrays within them too, as JSON, and back with every type and bit.

Contract: a value that is JSON already is kept as it is, so it stays readable. Every other known value is an object with
one key that starts with ``$``: ``$int`` (beyond 64 bits), ``$float`` (nan, inf), ``$tuple``, ``$size``, ``$bytes``,
``$bytearray``, ``$dict`` (keys other than text, or texts out of their sorted order, since a file sorts them),
``$scalar``, ``$array``, ``$objects`` (NumPy), ``$tensor`` (torch). Their bytes are base64 (``to_json``), or lie beside
the JSON, which has place and length (``pack``); long lists of numbers lie there too (``$ints``, ``$floats``). No code
is run to read them. An unknown value is refused, never turned into text.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.errors import BatchError
from mock_scheduler.support.digests import JSON, MAX_JSON_DEPTH
from mock_scheduler.support.tensor_bytes import (
    as_bytes,
    dtype_name,
    find_dtype,
    from_bytes,
    has_plain_bytes,
)
from mock_scheduler.support.text import shorten

_PLAIN_NAN = struct.pack(">d", math.nan).hex()
_INT64 = 2**63
#: Lists of so many numbers lie in the bytes of a packed value.
_MANY = 16


def to_json(value: object, where: str) -> JSON:
    """The value as JSON; raises ``BatchError`` naming ``where`` and the type it does not know, or where it is too
    deep."""
    return _Writer(where).write(value)


def from_json(value: JSON) -> Any:  # noqa: ANN401 - any of the values that to_json knows
    """The inverse of ``to_json``; raises ``ValueError`` where the value was not written by it."""
    return _read(value, base64.b64decode)


def pack(value: object, place: str, content: bytearray | None = None) -> tuple[JSON, bytearray]:
    """Packs a value; ``content``: bytes of values before it, to which its own are added.

    Raises:
        BatchError: as ``to_json``; the message begins with the place of the value in the one packed.
    """
    beside = bytearray() if content is None else content
    return _PackingWriter(place, beside).write(value), beside


def unpack(packed: JSON, content: bytes) -> Any:  # noqa: ANN401 - the framework's
    """Gives a packed value again.

    Raises:
        BatchError: it was not made by ``pack``.
    """

    def take(place: Any) -> bytes:  # noqa: ANN401 - JSON
        start, count = place
        if not 0 <= start <= start + count <= len(content):
            raise BatchError(f"a packed value lies at bytes {start} to {start + count} of {len(content)}")
        return content[start : start + count]

    try:
        return _read(packed, take)
    except (ValueError, TypeError, KeyError, IndexError, struct.error, RuntimeError, OverflowError) as error:
        if isinstance(error, BatchError):
            raise
        raise BatchError(f"{shorten(str(packed), 80)} is no packed value: {error}") from error


class _Writer:
    """Writes one value; ``where``: begins messages."""

    def __init__(self, where: str) -> None:
        self._where, self._depth = where, 0

    def put(self, content: bytes) -> JSON:
        """Keep bytes, and give what stands for them."""
        return base64.b64encode(content).decode("ascii")

    def write_list(self, items: list[Any]) -> JSON:
        """Give a list of known values."""
        return [self._inner(item, f"[{number}]") for number, item in enumerate(items)]

    def name_place(self, step: str) -> str:
        """Give the name of a part of the value, for messages."""
        return self._where

    def write(self, value: object) -> JSON:
        """Give any known value."""
        if self._depth > MAX_JSON_DEPTH:
            raise BatchError(f"{self._where} holds more than {MAX_JSON_DEPTH} levels of values in each other")
        kind = type(value)
        if value is None or kind in (bool, str):
            return value  # type: ignore[return-value]  # the kinds above are JSON
        if isinstance(value, int) and kind is int:
            return value if -_INT64 <= value < _INT64 else {"$int": hex(value)}
        if isinstance(value, float) and kind is float:
            return value if math.isfinite(value) else {"$float": _name_float(value)}
        if isinstance(value, list) and kind is list:
            return self.write_list(value)
        if isinstance(value, tuple) and kind in (tuple, torch.Size):
            tag = "$tuple" if kind is tuple else "$size"
            return {tag: [self._inner(item, f"[{number}]") for number, item in enumerate(value)]}
        if isinstance(value, dict) and kind is dict:
            return self._write_dict(value)
        if isinstance(value, bytes | bytearray) and kind in (bytes, bytearray):
            return {f"${kind.__name__}": self.put(bytes(value))}
        if isinstance(value, np.generic) and value.dtype.kind not in "VO":
            return {"$scalar": [value.dtype.str, self.put(value.tobytes())]}
        if isinstance(value, np.ndarray) and kind not in (np.ndarray, np.memmap):
            raise self._unknown(kind)  # a mask, or fields, would be lost
        if isinstance(value, np.ndarray) and value.dtype.kind == "O":
            items = [self._inner(item, f"[{number}]") for number, item in enumerate(value.reshape(-1))]
            return {"$objects": [list(value.shape), items]}
        if isinstance(value, np.ndarray) and value.dtype.kind not in "VO":
            return {"$array": [value.dtype.str, list(value.shape), self.put(value.tobytes())]}
        if isinstance(value, torch.Tensor) and has_plain_bytes(value):
            content = as_bytes(value.detach().cpu()).numpy().tobytes()
            return {"$tensor": [dtype_name(value.dtype), list(value.shape), self.put(content)]}
        raise self._unknown(kind)

    def _unknown(self, kind: type) -> BatchError:
        return BatchError(
            f"{self._where} holds a value of type {kind.__module__}.{kind.__qualname__}, which cannot be recorded; "
            "expected JSON values, tuples, bytes, NumPy arrays and scalars, or tensors. Convert it, or leave the field "
            "out of the batch."
        )

    def _inner(self, value: object, step: str) -> JSON:
        where = self._where
        self._where, self._depth = self.name_place(step), self._depth + 1
        written = self.write(value)
        self._where, self._depth = where, self._depth - 1
        return written

    def _write_dict(self, value: dict[Any, Any]) -> JSON:
        keys = list(value)
        # JSON of a recording has its keys sorted; where these are not, their order is kept with them.
        if all(type(key) is str and not key.startswith("$") for key in keys) and keys == sorted(keys):
            return {key: self._inner(item, f".{shorten(key, 40)}") for key, item in value.items()}
        return {
            "$dict": [
                [self._inner(key, ", a key"), self._inner(item, f".{shorten(str(key), 40)}")]
                for key, item in value.items()
            ]
        }


class _PackingWriter(_Writer):
    """Keeps bytes, and long lists of numbers, beside the JSON."""

    def __init__(self, where: str, content: bytearray) -> None:
        super().__init__(where)
        self._content = content

    def put(self, content: bytes) -> JSON:
        """Add bytes to those beside."""
        start = len(self._content)
        self._content += content
        return [start, len(content)]

    def write_list(self, items: list[Any]) -> JSON:
        """Give a list; many numbers of one type are bytes."""
        kinds = set(map(type, items)) if len(items) >= _MANY else set()
        if kinds == {int} and min(items) >= -_INT64 and max(items) < _INT64:
            return {"$ints": self.put(np.array(items, dtype="<i8").tobytes())}
        if kinds == {float}:
            return {"$floats": self.put(struct.pack(f"<{len(items)}d", *items))}
        return super().write_list(items)

    def name_place(self, step: str) -> str:
        """Give the path to a part of the value."""
        return f"{self._where}{step}"


def _read(value: JSON, take: Callable[[Any], bytes]) -> Any:  # noqa: ANN401 - any known value
    if isinstance(value, list | tuple):
        return [_read(item, take) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: _read(item, take) for key, item in value.items()}
    ((tag, content),) = value.items()
    match tag, content:
        case "$int", str():
            return int(content, 16)
        case "$float", str():
            return _read_float(content)
        case "$tuple", [*items]:
            return tuple(_read(item, take) for item in items)
        case "$dict", [*pairs]:
            return {_read(key, take): _read(item, take) for key, item in pairs}
        case "$size", [*items]:
            return torch.Size(_read(item, take) for item in items)
        case "$bytes", _:
            return bytes(take(content))
        case "$bytearray", _:
            return bytearray(take(content))
        case "$ints", _:
            return np.frombuffer(take(content), dtype="<i8").tolist()
        case "$floats", _:
            data = take(content)
            return list(struct.unpack(f"<{len(data) // 8}d", data))
        case "$scalar", [str() as dtype, place]:
            return _scalar(_find_dtype(dtype), take(place))
        case "$array", [str() as dtype, [*shape], place]:
            return np.ndarray(tuple(shape), dtype=_find_dtype(dtype), buffer=bytearray(take(place)))
        case "$objects", [[*shape], [*items]]:
            return object_array([_read(item, take) for item in items], shape)
        case "$tensor", [str() as dtype, [*shape], place]:
            kind, stored = find_dtype(dtype), np.frombuffer(bytearray(take(place)), dtype=np.uint8)
            if len(stored) != math.prod(shape) * kind.itemsize:
                raise ValueError(f"a tensor {dtype} {shape} has {len(stored)} bytes")
            return from_bytes(stored, kind, shape)
    raise ValueError(f"unknown value {tag}")


def _name_float(value: float) -> str:
    """``inf``, ``-inf`` or ``nan``; another NaN than that one, with a sign or a payload, by its bits."""
    bits = struct.pack(">d", value).hex()
    return f"nan:{bits}" if math.isnan(value) and bits != _PLAIN_NAN else repr(value)


def _read_float(text: str) -> float:
    name, _, bits = text.partition(":")
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0] if bits else float(name)
    return value


def _find_dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind in "VO":
        raise ValueError(f"an array is of dtype {shorten(text, 40)!r}; expected numbers, bools, times or texts")
    return dtype


def _scalar(dtype: np.dtype[Any], content: bytes) -> Any:  # noqa: ANN401 - a NumPy scalar
    """Texts are made by their own types: as an element of an array they would lose the nulls at their end. NumPy gives
    an empty one a byte, which is none of its."""
    content = content[: dtype.itemsize]
    if dtype.kind == "S":
        return np.bytes_(content)
    if dtype.kind == "U":
        return np.str_(content.decode("utf-32-be" if dtype.str[0] == ">" else "utf-32-le", "surrogatepass"))
    return np.ndarray((), dtype=dtype, buffer=bytearray(content))[()]


def object_array(items: list[Any], shape: list[int]) -> npt.NDArray[np.object_]:
    """A NumPy object array of exactly these items, whatever they are."""
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        array[index] = item
    return array.reshape(shape)
