import struct
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.batch.building import build_column
from mock_scheduler.batch.columns import JsonColumn, Ragged, RowValue, TensorColumn
from mock_scheduler.errors import BatchError
from mock_scheduler.support.tensor_bytes import as_bytes

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float64,
    torch.complex64,
]


def tensor_of(content: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    raw = torch.tensor([byte % 2 if dtype is torch.bool else byte for byte in content], dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(DTYPES), st.integers(0, 5), st.sampled_from([(), (2,), (2, 3), (0,)]), st.booleans())
def test_every_bit_of_any_dtype_and_shape_is_kept(
    data: st.DataObject, dtype: torch.dtype, num_rows: int, shape: tuple[int, ...], ragged: bool
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows)) if ragged else [1] * num_rows
    entry = torch.Size(shape).numel()
    rows: list[torch.Tensor] = []
    for size in sizes:
        width = size * entry * dtype.itemsize
        content = data.draw(st.binary(min_size=width, max_size=width))
        rows.append(tensor_of(content, dtype, (size, *shape) if ragged else shape))
    if num_rows == 0:
        return
    column = build_column("x", [Ragged(row) if ragged else row for row in rows])
    assert isinstance(column, TensorColumn)
    assert column.problems("x", num_rows) == []
    chosen = data.draw(st.lists(st.integers(0, num_rows - 1)))
    for part, expected in ((column, rows), (column.select(chosen), [rows[index] for index in chosen])):
        assert len(part) == len(expected)
        for index, (entry_of_row, row) in enumerate(zip(part.rows(), expected, strict=True)):
            for found in (entry_of_row, part.row(index)):
                values = found.values if isinstance(found, Ragged) else found
                assert isinstance(found, Ragged) == ragged
                assert (values.dtype, values.shape) == (row.dtype, row.shape)
                assert as_bytes(values).tolist() == as_bytes(row).tolist()


def test_bytes_of_a_view_are_those_of_its_values() -> None:
    transposed = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16).T
    assert bytes(as_bytes(transposed).tolist()) == struct.pack("<4h", 1, 3, 2, 4)
    assert bytes(as_bytes(torch.tensor([1j]).conj()).tolist()) == struct.pack("<2f", 0.0, -1.0)
    assert bytes(as_bytes(torch.tensor(1.0, requires_grad=True)).tolist()) == struct.pack("<f", 1.0)


def test_a_column_is_a_copy() -> None:
    row = torch.tensor([1, 2])
    column = build_column("x", [row])
    row[0] = 9
    assert isinstance(column, TensorColumn)
    assert column.values.tolist() == [[1, 2]]


def test_the_digest_tells_columns_apart() -> None:
    zero, negative_zero = torch.tensor([0.0]), torch.tensor([-0.0])
    columns = [
        TensorColumn(values=zero),
        TensorColumn(values=negative_zero),
        TensorColumn(values=zero.to(torch.float16)),
        TensorColumn(values=zero, offsets=torch.tensor([0, 1])),
        TensorColumn(values=zero, offsets=torch.tensor([0, 0, 1])),
        JsonColumn(items=(0,)),
        JsonColumn(items=("0",)),
    ]
    assert len({column.digest() for column in columns}) == 7


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (TensorColumn(values=torch.zeros(3)), "extra 'x' has 3 rows; expected 2"),
        (
            TensorColumn(values=torch.tensor(1.0)),
            "extra 'x': expected a tensor with a dimension for the rows; it is torch.float32 [] on cpu",
        ),
        (
            TensorColumn(values=torch.zeros(2, device="meta")),
            "extra 'x': expected a dense CPU tensor; it is torch.float32 [2] on meta",
        ),
        (
            TensorColumn(values=torch.zeros(4), offsets=torch.tensor([0, 4])),
            "extra 'x': offsets are torch.int64 [2] on cpu; expected int64 [3] on cpu",
        ),
        (
            TensorColumn(values=torch.zeros(4), offsets=torch.tensor([0, 5, 4])),
            "extra 'x': offsets must rise from 0 to 4",
        ),
        (
            TensorColumn(values=torch.zeros(4), offsets=torch.tensor([0, 1, 3])),
            "extra 'x': offsets must rise from 0 to 4",
        ),
        (JsonColumn(items=(1,)), "extra 'x' has 1 rows; expected 2"),
        (
            JsonColumn(items=(1, float("nan"))),
            "extra 'x', row 1 is nan; JSON has no NaN and no infinity",
        ),
    ],
)
def test_a_column_that_does_not_fit_is_told(column: TensorColumn | JsonColumn, problem: str) -> None:
    (found,) = column.problems("x", 2)
    assert found == problem


@pytest.mark.parametrize("name", ["", "-a", "a b", "a" * 129, "ü"])
def test_names_that_no_file_could_hold_are_refused(name: str) -> None:
    with pytest.raises(BatchError) as caught:
        build_column(name, [1])
    assert str(caught.value) == (
        f"extra {name!r}: a name has up to 128 letters, digits and '_./:-', the first a letter or digit"
    )


@pytest.mark.parametrize(
    ("rows", "kinds"),
    [
        ([torch.zeros(2), torch.zeros(3)], "row 0 is torch.float32 [2] on cpu, row 1 is torch.float32 [3] on cpu"),
        (
            [torch.zeros(2), Ragged(torch.zeros(2))],
            "row 0 is torch.float32 [2] on cpu, row 1 is Ragged torch.float32 [n, ]",
        ),
        ([1, torch.zeros(2)], "row 0 is int, row 1 is torch.float32 [2] on cpu"),
        (
            [Ragged(torch.zeros(1, 2)), Ragged(torch.zeros(1, 3))],
            "row 0 is Ragged torch.float32 [n, 2], row 1 is Ragged",
        ),
    ],
)
def test_rows_of_different_kinds_are_refused(rows: list[RowValue], kinds: str) -> None:
    with pytest.raises(BatchError, match="all rows must be of one kind") as caught:
        build_column("x", rows)
    assert str(caught.value).startswith(f"extra 'x': {kinds}")


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(BatchError, match="extra 'x', row 0 is of type object; expected a dict, list"):
        build_column("x", [object()])


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, Ragged], ids=["dense", "ragged"])
@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.empty(2, device="meta"), "expected a dense CPU tensor; it is torch.float32 [2] on meta"),
        (
            torch.eye(2).to_sparse(),
            "expected a dense CPU tensor; it is torch.float32 [2, 2] on cpu, torch.sparse_coo",
        ),
        (torch.ones(2, requires_grad=True), "it requires grad, which a recording cannot keep: detach it"),
        (
            torch.tensor([0, 3], dtype=torch.uint8).view(torch.bool),
            "it is bool with a byte of 3; expected 0 and 1, as bits are recorded",
        ),
    ],
    ids=["meta", "sparse", "grad", "bool"],
)
def test_a_tensor_that_cannot_be_kept_is_refused_by_its_row(
    tensor: torch.Tensor, problem: str, wrap: Callable[[torch.Tensor], RowValue]
) -> None:
    """These were raw errors of torch, or came back with other bits."""
    with pytest.raises(BatchError) as caught:
        build_column("x", [wrap(tensor)] * 2)
    assert str(caught.value) == f"extra 'x', row 0: {problem}"
    if isinstance(wrap(tensor), torch.Tensor):
        assert TensorColumn(values=tensor).problems("x", 2) == [f"extra 'x': {problem}"]


def test_a_ragged_entry_without_dimensions_is_refused() -> None:
    with pytest.raises(BatchError) as caught:
        build_column("x", [Ragged(torch.zeros(1)), Ragged(torch.tensor(1.0))])
    assert str(caught.value) == (
        "extra 'x', row 1: expected a ragged tensor with a dimension for its entries; it is torch.float32 [] on cpu"
    )


def test_views_of_any_kind_are_columns_of_their_values() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    for view in (values.conj(), values.conj().imag, torch.tensor([1.5]).expand(2)):
        plain = view.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        assert TensorColumn(values=view).digest() == TensorColumn(values=plain).digest()
        assert TensorColumn(values=view).copy().digest() == TensorColumn(values=plain).digest()
    column = build_column("x", [Ragged(torch.tensor([1.5]).expand(4)[:size]) for size in (0, 1, 2)])
    assert isinstance(column, TensorColumn)
    assert column.values.tolist() == [1.5, 1.5, 1.5]


def test_json_that_would_come_back_otherwise_is_refused() -> None:
    """A number as a key came back as a text, a tuple as a list."""
    assert JsonColumn(items=({"a": [1]}, {"b": {0: 1}}, (1,))).problems("x", 3) == [
        "extra 'x', row 1.b: key 0 is int; JSON has text keys only",
        "extra 'x', row 2 is a tuple, which would come back as a list; make it one",
    ]
