"""Has named extra columns of a rollout batch: tensors of any dtype and shape, or JSON values, one entry per row.

Contract: immutable; values are carried bit for bit (NaN payloads and -0.0 included) and never converted. A dense tensor
column has one entry of the same shape per row, a ragged one any number of them. Tensors are dense, on the CPU, without
a gradient's history, and must not be written to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mock_scheduler.batch.fields import Given, as_array, as_raw, copy_given, given, tensor_field
from mock_scheduler.batch.pickled import PickledByBuffers
from mock_scheduler.errors import BatchError
from mock_scheduler.support.digests import JSON, canonical_json, check_json
from mock_scheduler.support.raw_tensors import RawTensor, bool_problem

if TYPE_CHECKING:
    import torch

#: Types of which every value is JSON.
_PLAIN_JSON = frozenset((bool, int, str, type(None)))
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]{0,127}")


@dataclass(frozen=True, slots=True, eq=False)
class Ragged(PickledByBuffers):
    """Holds a row's part of a ragged column: ``values`` ``[n, *shape]`` with any ``n``, 0 included."""

    values: torch.Tensor


#: What one row holds of a column: a tensor is its entry of a dense column, ``Ragged`` of a ragged one, else JSON.
RowValue: TypeAlias = "torch.Tensor | Ragged | JSON"


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorColumn(PickledByBuffers):
    """``values`` ``[B, *shape]`` where ``offsets`` is None (dense; a scalar per row has shape ``[B]``), else ragged:
    ``[sum n, *shape]``, row i from ``offsets[i]`` to ``offsets[i + 1]`` (int64 ``[B + 1]``)."""

    values: torch.Tensor = tensor_field()
    offsets: torch.Tensor | None = tensor_field(is_optional=True)

    @classmethod
    def of_given(cls, values: Given, offsets: Given | None = None) -> TensorColumn:
        """Makes a column of arrays or bytes, which needs no torch until somebody asks for its tensors."""
        fields: dict[str, Any] = {"values": values, "offsets": offsets}
        return cls(**fields)

    @property
    def raw(self) -> RawTensor:
        """Returns ``values`` as bytes, without torch where they were read from a file."""
        return as_raw(given(self, "values"))

    @property
    def bounds(self) -> npt.NDArray[np.int64] | None:
        """Returns ``offsets`` as an array."""
        offsets = given(self, "offsets")
        return None if offsets is None else as_array(offsets)

    def __len__(self) -> int:
        bounds = self.bounds
        return len(bounds) - 1 if bounds is not None else int(given(self, "values").shape[0])

    def row(self, index: int) -> torch.Tensor | Ragged:
        """Returns the entry of one row, as a view."""
        bounds = self.bounds
        if bounds is None:
            return self.values[index]
        return Ragged(self.values[int(bounds[index]) : int(bounds[index + 1])])

    def rows(self) -> Sequence[torch.Tensor | Ragged]:
        """Returns the entries of all rows, as views."""
        bounds = self.bounds
        if bounds is None:
            return self.values.unbind()
        return [Ragged(part) for part in self.values.split(np.diff(bounds).tolist())]

    def row_bytes(self) -> tuple[npt.NDArray[np.uint8], list[int]]:
        """Returns all bytes, and the ``B + 1`` positions in them between rows."""
        raw, bounds = self.raw, self.bounds
        numbers = range(len(self) + 1) if bounds is None else bounds.tolist()
        return raw.content, [number * raw.entry_bytes for number in numbers]

    def select(self, rows: Sequence[int]) -> TensorColumn:
        """Returns the column of copies of the given rows' entries, in the order given."""
        # By bytes: torch cannot index every dtype, and converts none here.
        raw, own = self.raw, self.bounds
        content, bounds = self.row_bytes()
        pieces = [content[bounds[row] : bounds[row + 1]] for row in rows]
        joined = np.concatenate([np.empty(0, dtype=np.uint8), *pieces])
        count, offsets = len(rows), None
        if own is not None:
            offsets = np.concatenate([[0], np.diff(own)[np.asarray(rows, dtype=np.int64)]]).cumsum()
            count = int(offsets[-1])
        return TensorColumn.of_given(RawTensor(joined, raw.dtype, (count, *raw.shape[1:])), offsets)

    def copy(self) -> TensorColumn:
        """Returns an equal column with its own memory."""
        offsets = given(self, "offsets")
        return TensorColumn.of_given(
            copy_given(given(self, "values")), None if offsets is None else copy_given(offsets)
        )

    def digest(self) -> str:
        """Digest over dtype, shape, every bit and, where ragged, the offsets."""
        bounds = self.bounds
        return self.raw.digest() + ("" if bounds is None else RawTensor.of_array(bounds).digest())

    def problems(self, name: str, num_rows: int) -> list[str]:
        """Lists its problems in a batch of ``num_rows`` rows."""
        values, offsets = given(self, "values"), given(self, "offsets")
        problem = bool_problem(values) if isinstance(values, RawTensor) else _tensor_problem(values)
        if problem:
            return [f"extra {name!r}: {problem}"]
        num_values = values.shape[0]
        if offsets is None:
            return [] if num_values == num_rows else [f"extra {name!r} has {num_values} rows; expected {num_rows}"]
        problem = _offsets_problem(offsets, num_rows)
        if problem:
            return [f"extra {name!r}: {problem}"]
        bounds = as_array(offsets)
        if bounds[0] != 0 or bounds[-1] != num_values or (bounds[1:] < bounds[:-1]).any():
            return [f"extra {name!r}: offsets must rise from 0 to {num_values}"]
        return []


def _tensor_problem(values: torch.Tensor) -> str:
    from mock_scheduler.support.tensor_bytes import shape_text, tensor_problem

    problem = tensor_problem(values)
    if not problem and values.dim() < 1:
        return f"expected a tensor with a dimension for the rows; it is {shape_text(values)}"
    return problem


def _offsets_problem(offsets: torch.Tensor | npt.NDArray[np.int64], num_rows: int) -> str:
    if isinstance(offsets, np.ndarray):
        is_int64, found = offsets.dtype == np.int64, f"{offsets.dtype} {list(offsets.shape)}"
    else:
        from mock_scheduler.support.tensor_bytes import dtype_name, has_plain_bytes, shape_text

        is_int64 = has_plain_bytes(offsets) and offsets.is_cpu and dtype_name(offsets.dtype) == "int64"
        found = shape_text(offsets)
    if is_int64 and offsets.shape == (num_rows + 1,):
        return ""
    return f"offsets are {found}; expected int64 [{num_rows + 1}] on cpu"


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


def join_columns(columns: Sequence[Column]) -> Column:
    """Returns the column of the rows of several of one ``column_kind``, one after another."""
    tensors = [column for column in columns if isinstance(column, TensorColumn)]
    if not tensors:
        return JsonColumn(
            items=tuple(item for column in columns if isinstance(column, JsonColumn) for item in column.items)
        )
    joined = RawTensor.join([column.raw for column in tensors])
    sizes = [np.diff(column.bounds) for column in tensors if column.bounds is not None]
    return TensorColumn.of_given(joined, np.concatenate([[0], *sizes]).cumsum() if sizes else None)


def column_kind(column: Column) -> str:
    """Returns the kind of a column's entry: ``float32 [3]``, ``ragged float32 [n, 3]``, or ``JSON``."""
    if isinstance(column, JsonColumn):
        return "JSON"
    raw = column.raw
    dtype, shape = raw.dtype, [str(size) for size in raw.shape[1:]]
    if column.bounds is None:
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
