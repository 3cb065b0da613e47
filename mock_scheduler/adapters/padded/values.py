"""The fields of a framework's batch that are no framed tensors: as columns and meta of a batch, and back.

Python values become JSON (``plain_values``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mock_scheduler.adapters.plain_values import from_json, to_json
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.columns import Column, JsonColumn, TensorColumn
from mock_scheduler.errors import BatchError
from mock_scheduler.support.digests import JSON


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
