"""The fields of a TransferQueue's rows, apart from the package that holds them, and a TensorDict as such fields.

Contract: ``build_tensordict(read_tensordict(fields))`` has the same names in the same order, the same kind of container
for each, and the same rows with every type and bit. A ragged tensor's rows are what counts: one with holes between its
rows comes back without them. This module imports tensordict to build, never to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from mock_scheduler.errors import BatchError

#: How a field's rows are held: a nested tensor of either layout, one tensor of all rows, a value for each row that is
#: no tensor, or one such value of all rows.
Kind: TypeAlias = Literal["jagged", "strided", "dense", "stack", "shared"]

#: The fields by name, in their order.
Columns: TypeAlias = "Mapping[str, QueueColumn]"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QueueColumn:
    """One field: ``rows`` has a value for each row. ``ragged_dim``: of a jagged tensor, counted as in the whole."""

    kind: Kind
    rows: Sequence[object]
    ragged_dim: int = 1


def read_tensordict(fields: Any) -> dict[str, QueueColumn]:  # noqa: ANN401 - a TensorDict, of a package that is not ours
    """Reads a TensorDict of one dimension of rows; raises ``BatchError`` where a field is of another form."""
    if len(fields.batch_size) != 1:
        raise BatchError(f"a TensorDict has batch_size {list(fields.batch_size)}; expected one dimension of rows")
    num_rows = int(fields.batch_size[0])
    # ``get``, since subscripts turn values that are no tensors into lists.
    return {str(name): _read_field(str(name), fields.get(name), num_rows) for name in fields.keys()}  # noqa: SIM118


def _read_field(name: str, value: Any, num_rows: int) -> QueueColumn:  # noqa: ANN401 - of a TensorDict
    if isinstance(value, torch.Tensor):
        if not value.is_nested:
            return QueueColumn(kind="dense", rows=value.unbind())
        rows = [row.contiguous() for row in value.unbind()]
        if value.layout is torch.jagged:
            return QueueColumn(kind="jagged", rows=rows, ragged_dim=int(getattr(value, "_ragged_idx", 1)))
        return QueueColumn(kind="strided", rows=rows)
    parts = getattr(value, "tensordicts", None)
    if isinstance(parts, list) and len(parts) == num_rows:
        return QueueColumn(kind="stack", rows=[_plain(name, part) for part in parts])
    return QueueColumn(kind="shared", rows=[_plain(name, value)] * num_rows)


def _plain(name: str, value: Any) -> object:  # noqa: ANN401 - of a TensorDict
    """A value of one row; nested stacks, as lists of lists become, are lists again."""
    if getattr(value, "tensordicts", None) is not None:
        return [_plain(name, part) for part in value.tensordicts]
    if not hasattr(value, "data") or not hasattr(value, "batch_size") or type(value).__name__ != "NonTensorData":
        raise BatchError(f"field {name!r} holds a {type(value).__name__}; expected a tensor, or a value for each row")
    return value.data


def build_tensordict(columns: Columns) -> Any:  # noqa: ANN401 - a TensorDict
    """Builds the TensorDict of rows; raises ``BatchError`` where there is no field."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict  # heavy, and only where a queue is

    if not columns:
        raise BatchError("rows without any field cannot be put into a TransferQueue")
    built: dict[str, Any] = {}
    for name, column in columns.items():
        rows: Any = list(column.rows)
        if column.kind == "stack":
            built[name] = NonTensorStack(*[NonTensorData(row) for row in rows])
        elif column.kind == "shared":
            built[name] = NonTensorData(rows[0])
        else:
            built[name] = build_tensor(column)
    return TensorDict(built, batch_size=[len(next(iter(columns.values())).rows)])


def build_tensor(column: QueueColumn) -> torch.Tensor:
    """Builds the tensor of a field whose rows are tensors."""
    rows: Any = list(column.rows)
    if column.kind == "dense":
        return torch.stack(rows)
    if column.kind == "strided":
        return torch.nested.as_nested_tensor(rows, layout=torch.strided)
    within = column.ragged_dim - 1
    sizes = torch.tensor([0, *(row.shape[within] for row in rows)], dtype=torch.int64)
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(rows, dim=within), offsets=sizes.cumsum(0), jagged_dim=column.ragged_dim
    )


def select_rows(columns: Columns, places: Sequence[int]) -> dict[str, QueueColumn]:
    """Gives the fields of some rows."""
    return {
        name: QueueColumn(kind=column.kind, rows=[column.rows[place] for place in places], ragged_dim=column.ragged_dim)
        for name, column in columns.items()
    }
