"""The fields of a framework's batch that are no framed tensors: as columns and meta of a batch, and back.

Python values become JSON and come back with the same types.
Contract: a value that is JSON already is kept as it is, so it stays readable. Every other known value is an object
with one key that starts with ``$``: ``$tuple``, ``$float`` (nan, inf), ``$bytes``, ``$dict`` (keys other than text, or
texts out of their sorted order, since a file sorts them), ``$scalar``, ``$array``, ``$objects`` (NumPy),
``$tensor`` (torch). No code is run to read them. An unknown value is refused, never turned into text.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.columns import Column, JsonColumn, TensorColumn
from mock_scheduler.errors import BatchError
from mock_scheduler.support.digests import JSON, MAX_JSON_DEPTH
from mock_scheduler.support.tensor_bytes import as_bytes, dtype_name, find_dtype, from_bytes, has_plain_bytes

_PLAIN_NAN = struct.pack(">d", math.nan).hex()


def write_rows(name: str, values: Sequence[object], order: Sequence[int]) -> JsonColumn:
    """The column of a field with one Python value per row."""
    if isinstance(values, np.ndarray) and values.dtype.kind == "U":
        values = values.tolist()  # texts, which need no dtype of their own
    return JsonColumn(items=tuple(to_json(values[row], f"field {name!r}, row {row},") for row in order))


def write_identity(name: str, values: Sequence[object], order: Sequence[int]) -> Column:
    """``write_rows`` of a field that identifies the row: int64 where all values are such numbers, as they mostly are,
    since JSON takes several times as long to read."""
    numbers = [value for value in values if type(value) is int and -(2**63) <= value < 2**63]
    if len(numbers) < len(values):
        return write_rows(name, values, order)
    return TensorColumn(values=torch.tensor([numbers[row] for row in order], dtype=torch.int64))


def describe_rows(values: object) -> dict[str, JSON]:
    """Describes a field for its reader: its container, and for an array its dtype and further dimensions."""
    if isinstance(values, np.ndarray):
        return {"kind": "rows", "container": values.dtype.str, "shape": list(values.shape[1:])}
    return {"kind": "rows", "container": type(values).__name__, "shape": []}


def read_rows(items: Sequence[JSON], kind: Mapping[str, Any]) -> Any:  # noqa: ANN401 - list, tuple or array
    """The field of the given values."""
    values = [from_json(item) for item in items]
    if kind["container"] in ("list", "tuple"):
        return values if kind["container"] == "list" else tuple(values)
    array = np.empty((len(values), *kind["shape"]), dtype=np.dtype(kind["container"]))
    for index, value in enumerate(values):
        array[index] = value
    return array


def read_column(batch: RolloutBatch, kind: Mapping[str, Any], order: Sequence[int]) -> Any:  # noqa: ANN401 - see read_rows
    """A dense tensor or a field of Python values, in the order of the framework's rows."""
    column: Column = batch.extras[kind["column"]] if kind["column"] is not None else JsonColumn(items=batch.tags)
    chosen = column.select(order)
    if isinstance(chosen, JsonColumn):
        return read_rows(chosen.items, kind)
    if kind["kind"] == "rows":
        return read_rows(chosen.values.tolist(), kind)
    return chosen.values.numpy() if kind["is_array"] else chosen.values


def write_meta(name: str, meta: Mapping[str, object], reserved: str) -> dict[str, JSON]:
    """The entries of a framework's meta as JSON; raises ``BatchError`` for keys a batch's meta cannot have."""
    wrong = [key for key in meta if type(key) is not str or key == reserved]
    if wrong:
        raise BatchError(f"{name!r} has the keys {wrong}; expected texts other than {reserved!r}")
    return {key: to_json(value, f"{name!r}, key {key!r},") for key, value in meta.items()}


def write_dense(tensor: torch.Tensor, order: Sequence[int]) -> TensorColumn:
    """The column of a tensor with one entry of one shape per row."""
    return TensorColumn(values=tensor).select(order)


def to_json(value: object, where: str, *, depth: int = 0) -> JSON:
    """The value as JSON; raises ``BatchError`` naming ``where`` and the type it does not know, or where it is too
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
            return from_bytes(content, find_dtype(dtype), shape)
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
