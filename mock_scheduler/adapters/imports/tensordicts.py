"""TensorDicts as their pickles describe them, without the package tensordict: names and tensors, or values per row.

Contract: two forms are read. A consolidated one is a list of leaves (dtype, shape, first and last byte) in one storage,
and each must lie in it with as many bytes as it claims. A plain one is a mapping of tensors; values that are no tensors
lie in ``NonTensorData`` (one for all rows) and ``NonTensorStack`` (one for each).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from mock_scheduler.errors import BatchError
from mock_scheduler.support.pickles.data import Name, Record
from mock_scheduler.support.pickles.values import Jagged
from mock_scheduler.support.tensor_bytes import find_dtype, from_bytes
from mock_scheduler.support.text import shorten

_CONSOLIDATED = "tensordict._reductions._rebuild_tensordict_files_consolidated"
_PLAIN = "tensordict._reductions._make_td"
_DICT = "tensordict._td.TensorDict"
_DATA = "tensordict.tensorclass.NonTensorData"
_STACK = "tensordict.tensorclass.NonTensorStack"

#: Globals that a pickle of TensorDicts names beside those of tensors.
TENSORDICT_NAMES = (_CONSOLIDATED, _PLAIN, _DICT, _DATA, _STACK)


def read_tensordict(value: object, where: str) -> dict[str, Any]:
    """Gives the fields by name: a tensor, ``Jagged``, or a list of one value per row.

    Raises:
        BatchError: it is no TensorDict, or one of another form.
    """
    if isinstance(value, Record) and value.kind.text == _CONSOLIDATED and len(value.arguments) == 2:
        return _read_consolidated(*value.arguments, where)
    if isinstance(value, Record) and value.kind.text == _PLAIN:
        state = value.arguments[1]
        size = state.get("_batch_size")
        num_rows = size[0] if isinstance(size, tuple) and len(size) == 1 else None
        if value.arguments[0] != Name(_DICT) or num_rows is None:
            raise BatchError(f"{where} has a TensorDict of another class, or of no single dimension of rows")
        fields = state["_tensordict"]
        held = max(map(_count_held, fields.values()), default=0)
        if type(num_rows) is not int or not 0 <= num_rows <= held:
            raise BatchError(f"{where} states {num_rows!r} rows, and no field in it has more than {held} values")
        return {name: _read_field(item, num_rows, f"{where}, {name}") for name, item in fields.items()}
    raise BatchError(f"{where} is a {_kind(value)}; expected a TensorDict")


def _read_consolidated(about: object, storage: object, where: str) -> dict[str, Any]:
    if not isinstance(about, dict) or not isinstance(storage, torch.Tensor) or storage.dtype is not torch.uint8:
        raise BatchError(f"{where} has a consolidated TensorDict without its leaves")
    others = {name for name in about if name not in ("cls", "leaves", "cls_metadata", "non_tensors")}
    if others or about.get("non_tensors") or about.get("cls") != "TensorDict":
        raise BatchError(f"{where} has a TensorDict within a TensorDict ({sorted(map(str, others))}); it is not read")
    content, fields = storage.contiguous().numpy(), {}
    for name, leaf in about["leaves"].items():
        kind, shape, start, stop, _padding = leaf
        try:
            dtype = find_dtype(str(kind).removeprefix("torch."))
        except ValueError as error:
            raise BatchError(f"{where}, {name} {error}") from error
        is_sound = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
        size = math.prod(shape) * dtype.itemsize if is_sound else "other"
        if not is_sound or stop - start != size:
            raise BatchError(
                f"{where}, {name}: {kind} {list(shape)} lies at bytes {start} to {stop}; expected {size} bytes"
            )
        if stop > len(content):
            raise BatchError(f"{where}, {name}: lies at bytes {start} to {stop} of {len(content)}")
        if dtype is torch.bool and size and int(content[start:stop].max()) > 1:
            raise BatchError(f"{where}, {name}: is bool with other bytes than 0 and 1")
        fields[name] = from_bytes(content[start:stop].copy(), dtype, tuple(shape))
    return fields


def _count_held(value: object) -> int:
    """How many values a field holds; no more rows than these are made."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, Jagged):
        return len(value.rows)
    items = value.get("tensordicts") if isinstance(value, Record) and value.kind.text == _STACK else None
    return len(items) if isinstance(items, list | tuple) else 0


def _read_field(value: object, num_rows: int, where: str) -> object:
    if isinstance(value, torch.Tensor | Jagged):
        found = len(value.rows) if isinstance(value, Jagged) else len(value) if value.dim() else None
        if found != num_rows:
            raise BatchError(f"{where} has {found} rows; expected {num_rows}")
        return value
    if isinstance(value, Record) and value.kind.text == _DATA:
        return [_data_of(value, where)] * num_rows
    if isinstance(value, Record) and value.kind.text == _STACK:
        items = value.get("tensordicts")
        if not isinstance(items, list | tuple) or len(items) != num_rows:
            raise BatchError(f"{where} has other than {num_rows} rows")
        return [_data_of(item, where) for item in items]
    raise BatchError(f"{where} is a {_kind(value)}; expected a tensor or a value for each row")


def _data_of(value: object, where: str) -> object:
    if not isinstance(value, Record) or value.kind.text != _DATA or not isinstance(value.state, Mapping):
        raise BatchError(f"{where} is a {_kind(value)}; expected a plain value")
    held = value.state.get("non_tensordict")
    if not isinstance(held, Mapping) or "data" not in held:
        raise BatchError(f"{where} holds no plain value")
    return held["data"]


def _kind(value: object) -> str:
    return shorten(value.kind.text, 80) if isinstance(value, Record) else type(value).__name__
