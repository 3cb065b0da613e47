"""Builds the columns of a batch from the values of its rows.

Contract: values are copied bit for bit; rows of different kinds are refused, naming the column and the first such row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mock_scheduler.batch.columns import Column, JsonColumn, Ragged, RowValue, TensorColumn, check_column_name
from mock_scheduler.errors import BatchError
from mock_scheduler.support.raw_tensors import RawTensor
from mock_scheduler.support.tensor_bytes import shape_text, tensor_problem, to_raw


def build_column(name: str, row_values: Sequence[RowValue]) -> Column:
    """The column of one value per row, at least one; tensors are copied.

    All must be of one kind: tensors of one dtype and shape, ``Ragged`` of one dtype and trailing shape, or JSON.
    Raises ``BatchError`` naming the column and the first row of another kind.
    """
    check_column_name(name)
    _check_tensors(name, row_values)
    first = row_values[0]
    if isinstance(first, torch.Tensor):
        tensors = [value for value in row_values if isinstance(value, torch.Tensor)]
        kinds = [shape_text(value) if isinstance(value, torch.Tensor) else None for value in row_values]
        _check_alike(name, row_values, kinds)
        return TensorColumn.of_given(RawTensor.join([to_raw(tensor[None]) for tensor in tensors]))
    if isinstance(first, Ragged):
        pieces = [value.values for value in row_values if isinstance(value, Ragged)]
        _check_alike(name, row_values, [_ragged_kind(v) if isinstance(v, Ragged) else None for v in row_values])
        offsets = np.cumsum([0, *(len(piece) for piece in pieces)])
        return TensorColumn.of_given(RawTensor.join([to_raw(piece) for piece in pieces]), offsets)
    _check_alike(name, row_values, [None if isinstance(v, torch.Tensor | Ragged) else "JSON" for v in row_values])
    column = JsonColumn(items=tuple(v for v in row_values if not isinstance(v, torch.Tensor | Ragged)))
    problems = column.problems(name, len(row_values))
    if problems:
        raise BatchError("; ".join(problems))
    return column


def _check_tensors(name: str, row_values: Sequence[RowValue]) -> None:
    """Raise ``BatchError`` for the first row whose tensor cannot be an entry of any column."""
    for index, value in enumerate(row_values):
        tensor = value.values if isinstance(value, Ragged) else value
        if not isinstance(tensor, torch.Tensor):
            continue
        problem = tensor_problem(tensor)
        if not problem and isinstance(value, Ragged) and tensor.dim() < 1:
            problem = f"expected a ragged tensor with a dimension for its entries; it is {shape_text(tensor)}"
        if problem:
            raise BatchError(f"extra {name!r}, row {index}: {problem}")


def _check_alike(name: str, row_values: Sequence[RowValue], kinds: Sequence[str | None]) -> None:
    for index, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise BatchError(
                f"extra {name!r}: row 0 is {_describe(row_values[0])}, row {index} is {_describe(row_values[index])}; "
                "all rows must be of one kind (wrap tensors whose first dimension varies in Ragged)"
            )


def _ragged_kind(value: Ragged) -> str:
    return f"{value.values.dtype} [n, {', '.join(map(str, value.values.shape[1:]))}]"


def _describe(value: RowValue) -> str:
    if isinstance(value, torch.Tensor):
        return shape_text(value)
    return f"Ragged {_ragged_kind(value)}" if isinstance(value, Ragged) else type(value).__name__
