"""Python values of a framework's batch as JSON, and back with the same types.

Contract: what is JSON already is kept as it is, so that it stays readable. Everything else that this knows is an object
with one key that starts with ``$``: ``$tuple``, ``$float`` (nan, inf), ``$bytes``, ``$dict`` (other keys than text, or
texts that are not in their sorted order, which a file would not keep), ``$scalar``, ``$array``, ``$objects`` (NumPy),
``$tensor`` (torch). No code is run to read them. What this does not know is refused, never turned into text.
"""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.errors import BatchError
from mock_scheduler.support.digests import JSON, MAX_JSON_DEPTH
from mock_scheduler.support.tensor_bytes import DTYPES, as_bytes, dtype_name, from_bytes, has_plain_bytes

_PLAIN_NAN = struct.pack(">d", math.nan).hex()


def to_json(value: object, where: str, *, depth: int = 0) -> JSON:
    """The value as JSON; raises ``BatchError`` naming ``where`` and the type that it does not know, or where it is too
    deep; ``depth``: of the value in the one that it is a part of."""
    if depth > MAX_JSON_DEPTH:
        raise BatchError(f"{where} holds more than {MAX_JSON_DEPTH} levels of values in each other")
    kind, below = type(value), depth + 1
    if value is None or kind in (bool, int, str):
        return value  # type: ignore[return-value]  # the kinds above are JSON
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"$float": _name_float(value)}
    if isinstance(value, list) and kind is list:
        return [to_json(item, where, depth=below) for item in value]
    if isinstance(value, tuple) and kind is tuple:
        return {"$tuple": [to_json(item, where, depth=below) for item in value]}
    if isinstance(value, dict) and kind is dict:
        return _dict_to_json(value, where, below)
    if isinstance(value, bytes) and kind is bytes:
        return {"$bytes": _encode(value)}
    if isinstance(value, np.generic) and value.dtype.kind not in "VO":
        return {"$scalar": [value.dtype.str, _encode(value.tobytes())]}
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return {"$objects": [list(value.shape), [to_json(item, where, depth=below) for item in value.reshape(-1)]]}
    if isinstance(value, np.ndarray) and value.dtype.kind not in "VO":
        return {"$array": [value.dtype.str, list(value.shape), _encode(value.tobytes())]}
    if isinstance(value, torch.Tensor) and has_plain_bytes(value):
        content = as_bytes(value.cpu()).numpy().tobytes()
        return {"$tensor": [dtype_name(value.dtype), list(value.shape), _encode(content)]}
    raise BatchError(
        f"{where} holds a value of type {kind.__module__}.{kind.__qualname__}, which cannot be recorded; expected JSON "
        "values, tuples, bytes, NumPy arrays and scalars, or tensors. Convert it, or leave the field out of the batch."
    )


def _dict_to_json(value: dict[Any, Any], where: str, depth: int) -> JSON:
    keys = list(value)
    # JSON of a recording has its keys sorted; where these are not, their order is kept with them.
    if all(type(key) is str and not key.startswith("$") for key in keys) and keys == sorted(keys):
        return {key: to_json(item, where, depth=depth) for key, item in value.items()}
    pairs = [[to_json(key, where, depth=depth), to_json(item, where, depth=depth)] for key, item in value.items()]
    return {"$dict": pairs}


def from_json(value: JSON) -> Any:  # noqa: ANN401 - any of the values that to_json knows
    """The inverse of ``to_json``; raises ``ValueError`` where the value was not written by it."""
    if isinstance(value, list | tuple):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: from_json(item) for key, item in value.items()}
    ((tag, content),) = value.items()
    match tag, content:
        case "$float", str():
            return _read_float(content)
        case "$tuple", [*items]:
            return tuple(from_json(item) for item in items)
        case "$dict", [*pairs]:
            return {from_json(key): from_json(item) for key, item in pairs}
        case "$bytes", str():
            return base64.b64decode(content)
        case "$scalar", [str() as dtype, str() as text]:
            return _scalar(np.dtype(dtype), base64.b64decode(text))
        case "$array", [str() as dtype, [*shape], str() as text]:
            return _array(dtype, shape, text)
        case "$objects", [[*shape], [*items]]:
            return object_array([from_json(item) for item in items], shape)
        case "$tensor", [str() as dtype, [*shape], str() as text]:
            content = np.frombuffer(bytearray(base64.b64decode(text)), dtype=np.uint8)
            return from_bytes(content, DTYPES[dtype], shape)
    raise ValueError(f"unknown value {tag}")


def _name_float(value: float) -> str:
    """``inf``, ``-inf`` or ``nan``; another NaN than that one, with a sign or a payload, by its bits."""
    bits = struct.pack(">d", value).hex()
    return f"nan:{bits}" if math.isnan(value) and bits != _PLAIN_NAN else repr(value)


def _read_float(text: str) -> float:
    name, _, bits = text.partition(":")
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0] if bits else float(name)
    return value


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


def _array(dtype: str, shape: list[int], text: str) -> npt.NDArray[Any]:
    return np.ndarray(tuple(shape), dtype=np.dtype(dtype), buffer=bytearray(base64.b64decode(text)))


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
