"""Has named extra columns of a rollout batch: tensors of any dtype and shape, or JSON values, one entry per row.

Contract: immutable; values are carried bit for bit (NaN payloads and -0.0 included) and never converted. A dense tensor
column has one entry of the same shape per row, a ragged one any number of them. Tensors are dense, on the CPU, without
a gradient's history, and must not be written to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.batch.pickled import PickledByBuffers
from mock_scheduler.errors import BatchError
from mock_scheduler.support.digests import JSON, canonical_json, check_json
from mock_scheduler.support.tensor_bytes import (
    as_bytes,
    compute_tensor_digest,
    dtype_name,
    from_bytes,
    has_plain_bytes,
    shape_text,
)

#: Types of which every value is JSON.
_PLAIN_JSON = frozenset((bool, int, str, type(None)))
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]{0,127}")


@dataclass(frozen=True, slots=True, eq=False)
class Ragged(PickledByBuffers):
    """Holds a row's part of a ragged column: ``values`` ``[n, *shape]`` with any ``n``, 0 included."""

    values: torch.Tensor


#: What one row holds of a column: a tensor is its entry of a dense column, ``Ragged`` of a ragged one, else JSON.
RowValue: TypeAlias = "torch.Tensor | Ragged | JSON"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorColumn(PickledByBuffers):
    """``values`` ``[B, *shape]`` where ``offsets`` is None (dense; a scalar per row has shape ``[B]``), else ragged:
    ``[sum n, *shape]``, row i from ``offsets[i]`` to ``offsets[i + 1]`` (int64 ``[B + 1]``)."""

    values: torch.Tensor
    offsets: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def row(self, index: int) -> torch.Tensor | Ragged:
        """Returns the entry of one row, as a view."""
        if self.offsets is None:
            return self.values[index]
        return Ragged(self.values[int(self.offsets[index]) : int(self.offsets[index + 1])])

    def rows(self) -> Sequence[torch.Tensor | Ragged]:
        """Returns the entries of all rows, as views."""
        if self.offsets is None:
            return self.values.unbind()
        return [Ragged(part) for part in torch.split(self.values, self.offsets.diff().tolist())]

    def row_bytes(self) -> tuple[npt.NDArray[np.uint8], list[int]]:
        """Returns all bytes, and the ``B + 1`` positions in them between rows."""
        bounds = list(range(len(self) + 1)) if self.offsets is None else self.offsets.tolist()
        entry_size = self.values.dtype.itemsize * math.prod(self.values.shape[1:])
        return as_bytes(self.values).numpy(), [bound * entry_size for bound in bounds]

    def select(self, rows: Sequence[int]) -> TensorColumn:
        """Returns the column of copies of the given rows' entries, in the order given."""
        # By bytes: torch cannot index every dtype, and converts none here.
        content, bounds = self.row_bytes()
        pieces = [content[bounds[row] : bounds[row + 1]] for row in rows]
        joined = np.concatenate([np.empty(0, dtype=np.uint8), *pieces])
        count, offsets = len(rows), None
        if self.offsets is not None:
            sizes = [0, *self.offsets.diff()[torch.tensor(rows, dtype=torch.int64)].tolist()]
            count, offsets = sum(sizes), torch.tensor(sizes, dtype=torch.int64).cumsum(0)
        values = from_bytes(joined, self.values.dtype, (count, *self.values.shape[1:]))
        return TensorColumn(values=values, offsets=offsets)

    def copy(self) -> TensorColumn:
        """Returns an equal column with its own memory."""
        offsets = None if self.offsets is None else self.offsets.clone()
        return TensorColumn(values=self.values.clone(), offsets=offsets)

    def digest(self) -> str:
        """Digest over dtype, shape, every bit and, where ragged, the offsets."""
        offsets = "" if self.offsets is None else compute_tensor_digest(self.offsets)
        return compute_tensor_digest(self.values) + offsets

    def problems(self, name: str, num_rows: int) -> list[str]:
        """Lists its problems in a batch of ``num_rows`` rows."""
        values, offsets = self.values, self.offsets
        found_problem = _tensor_problem(values)
        if found_problem:
            return [f"extra {name!r}: {found_problem}"]
        if values.dim() < 1:
            return [f"extra {name!r}: expected a tensor with a dimension for the rows; it is {shape_text(values)}"]
        if offsets is None:
            found = len(values)
            return [] if found == num_rows else [f"extra {name!r} has {found} rows; expected {num_rows}"]
        is_offsets = has_plain_bytes(offsets) and offsets.is_cpu and offsets.dtype == torch.int64
        if not is_offsets or offsets.dim() != 1 or len(offsets) != num_rows + 1:
            return [f"extra {name!r}: offsets are {shape_text(offsets)}; expected int64 [{num_rows + 1}] on cpu"]
        bounds = offsets.numpy()
        if bounds[0] != 0 or bounds[-1] != len(values) or (bounds[1:] < bounds[:-1]).any():
            return [f"extra {name!r}: offsets must rise from 0 to {len(values)}"]
        return []


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JsonColumn:
    """One JSON value per row; NaN and infinities are no JSON."""

    items: tuple[JSON, ...]

    def __len__(self) -> int:
        return len(self.items)

    def row(self, index: int) -> JSON:
        """Returns the value of one row."""
        return self.items[index]

    def rows(self) -> Sequence[JSON]:
        """Returns the values of all rows."""
        return self.items

    def select(self, rows: Sequence[int]) -> JsonColumn:
        """Returns the column of the given rows, in the order given."""
        return JsonColumn(items=tuple(self.items[row] for row in rows))

    def copy(self) -> JsonColumn:
        """Copy the column; nothing else refers to its values."""
        return JsonColumn(items=tuple(copy_json(item) for item in self.items))

    def digest(self) -> str:
        """Returns the canonical JSON of all rows."""
        return canonical_json(self.items)

    def problems(self, name: str, num_rows: int) -> list[str]:
        """Lists its problems in a batch of ``num_rows`` rows."""
        if len(self.items) != num_rows:
            return [f"extra {name!r} has {len(self.items)} rows; expected {num_rows}"]
        if set(map(type, self.items)) <= _PLAIN_JSON:
            return []
        problems = []
        for row, item in enumerate(self.items):
            try:
                check_json(item, f"extra {name!r}, row {row}")
            except ValueError as error:
                problems.append(str(error))
        return problems


Column: TypeAlias = TensorColumn | JsonColumn


def column_kind(column: Column) -> str:
    """Returns the kind of a column's entry: ``float32 [3]``, ``ragged float32 [n, 3]``, or ``JSON``."""
    if isinstance(column, JsonColumn):
        return "JSON"
    dtype, shape = dtype_name(column.values.dtype), [str(size) for size in column.values.shape[1:]]
    if column.offsets is None:
        return f"{dtype} [{', '.join(shape)}]"
    return f"ragged {dtype} [{', '.join(['n', *shape])}]"


def copy_json(value: JSON) -> JSON:
    """An equal value whose lists and dicts nothing else refers to."""
    if isinstance(value, Mapping):
        return {name: copy_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [copy_json(item) for item in value]
    return value


def column_name_problem(name: str) -> list[str]:
    """Why a column cannot have this name; empty where it can."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return []
    return [f"extra {name!r}: a name has up to 128 letters, digits and '_./:-', the first a letter or digit"]


def check_column_name(name: str) -> None:
    """Raise ``BatchError`` where a column cannot have this name."""
    for problem in column_name_problem(name):
        raise BatchError(problem)


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
        return TensorColumn(values=_stack([tensor[None] for tensor in tensors]))
    if isinstance(first, Ragged):
        pieces = [value.values for value in row_values if isinstance(value, Ragged)]
        _check_alike(name, row_values, [_ragged_kind(v) if isinstance(v, Ragged) else None for v in row_values])
        sizes = torch.tensor([0, *(len(piece) for piece in pieces)], dtype=torch.int64)
        return TensorColumn(values=_stack(pieces), offsets=sizes.cumsum(0))
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
        problem = _tensor_problem(tensor)
        if not problem and isinstance(value, Ragged) and tensor.dim() < 1:
            problem = f"expected a ragged tensor with a dimension for its entries; it is {shape_text(tensor)}"
        if problem:
            raise BatchError(f"extra {name!r}, row {index}: {problem}")


def _tensor_problem(tensor: torch.Tensor) -> str:
    """Why a tensor cannot be recorded bit for bit; empty where it can."""
    if not has_plain_bytes(tensor) or not tensor.is_cpu:
        return f"expected a dense CPU tensor; it is {shape_text(tensor)}"
    if tensor.requires_grad:
        return "it requires grad, which a recording cannot keep: detach it"
    if tensor.dtype is torch.bool and tensor.numel() and int(as_bytes(tensor).max()) > 1:
        return f"it is bool with a byte of {int(as_bytes(tensor).max())}; expected 0 and 1, as bits are recorded"
    return ""


def _check_alike(name: str, row_values: Sequence[RowValue], kinds: Sequence[str | None]) -> None:
    for index, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise BatchError(
                f"extra {name!r}: row 0 is {_describe(row_values[0])}, row {index} is {_describe(row_values[index])}; "
                "all rows must be of one kind (wrap tensors whose first dimension varies in Ragged)"
            )


def _stack(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenated along the first dimension, bit for bit; by bytes, since torch cannot join every dtype."""
    first = pieces[0]
    total = sum(len(piece) for piece in pieces)
    joined = np.concatenate([as_bytes(piece).numpy() for piece in pieces])
    return from_bytes(joined, first.dtype, (total, *first.shape[1:]))


def _ragged_kind(value: Ragged) -> str:
    return f"{value.values.dtype} [n, {', '.join(map(str, value.values.shape[1:]))}]"


def _describe(value: RowValue) -> str:
    if isinstance(value, torch.Tensor):
        return shape_text(value)
    return f"Ragged {_ragged_kind(value)}" if isinstance(value, Ragged) else type(value).__name__
