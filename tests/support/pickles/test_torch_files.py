"""What torch.save and pickle wrote comes out bit for bit; what claims more, or would run code, is refused by name."""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.errors import ForeignFileError
from mock_scheduler.support.pickles.data import PickledDataError, Record
from mock_scheduler.support.pickles.torch_files import read_pickle_file, read_torch_bytes, read_torch_file
from mock_scheduler.support.pickles.values import Jagged, read_values
from mock_scheduler.support.tensor_bytes import DTYPES, as_bytes
from tests.fuzz.mutations import limits
from tests.fuzz.test_nexrl_fuzz import claim_tensor, pack_pt


def saved(value: object) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return read_torch_bytes(buffer.getvalue(), "file")


def pickled(value: object, protocol: int = 4, *, size_bytes: int | None = None, kept: tuple[str, ...] = ()) -> Any:
    data = pickle.dumps(value, protocol)
    return read_values(data, size_bytes=size_bytes or len(data), kept=kept)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(DTYPES.keys() - {"complex32"})),
    st.lists(st.integers(0, 4), max_size=3),
    st.binary(min_size=1024, max_size=1024),
)
def test_a_tensor_of_any_dtype_comes_out_to_the_bit(name: str, shape: list[int], content: bytes) -> None:
    """Of all but complex32, which torch warns of whenever one is made."""
    dtype = DTYPES[name]
    numel = int(np.prod(shape, dtype=int))
    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)[: numel * dtype.itemsize]
    tensor = (raw % 2 if name == "bool" else raw).clone().view(dtype).reshape(shape)
    found = saved({"x": tensor})["x"]
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert as_bytes(found).tolist() == as_bytes(tensor).tolist()


def test_views_of_one_storage_are_read() -> None:
    whole = torch.arange(12).reshape(3, 4)
    found = saved([whole.t(), whole[1:, ::2], whole[2, 3]])
    assert [tensor.tolist() for tensor in found] == [whole.t().tolist(), [[4, 6], [8, 10]], 11]


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([1, 2], dtype=">i4"),
        np.array(["a", "bcd"]),
        np.array([np.nan, -0.0, np.inf], dtype=np.float16),
        np.array(["text", {"a": [1]}, None], dtype=object),
        np.empty((0, 3), dtype=np.int8),
    ],
)
def test_an_array_comes_out_as_it_went_in(array: np.ndarray[Any, Any], protocol: int) -> None:
    found = pickled(array, protocol, size_bytes=10_000)
    assert found.dtype == array.dtype.newbyteorder("=") if array.dtype.kind != "i" else found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tobytes() == array.tobytes() or array.dtype == object
    assert pickle.dumps(found.tolist()) == pickle.dumps(array.tolist())


def test_other_values_come_out() -> None:
    value = {
        "s": np.float32(1.5),
        "b": b"\xff",
        "o": OrderedDict(a=torch.Size([2])),
        "d": torch.int16,
        "n": [2**70, 0.1],
    }
    found = saved(value)
    assert found == {"s": 1.5, "b": b"\xff", "o": {"a": (2,)}, "d": torch.int16, "n": [2**70, 0.1]}
    assert type(found["s"]) is np.float32


def test_numbers_in_a_row_are_read_as_they_are() -> None:
    numbers = [0, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 0.1, float("-inf"), -0.0, *range(300), 2**40]
    for protocol in (2, 5):
        found = pickled([numbers, numbers[::-1]], protocol, size_bytes=100_000)
        assert pickle.dumps(found) == pickle.dumps([numbers, numbers[::-1]])


def test_nested_tensors_are_rows() -> None:
    rows = [torch.rand(2, 3), torch.rand(0, 3), torch.rand(4, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, in torch's words
        jagged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        strided = torch.nested.nested_tensor(rows)
        found = saved([jagged, strided])
    for made in found:
        assert isinstance(made, Jagged)
        assert [row.tolist() for row in made.rows] == [row.tolist() for row in rows]


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., object], *arguments: object, state: object = None) -> None:
        self._call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def test_a_kept_object_is_a_record_of_values() -> None:
    found = pickled(Calls(struct.Struct, "<q", np.arange(3)), kept=("_struct.Struct",), size_bytes=1000)
    assert isinstance(found, Record)
    assert (found.kind.text, found.arguments[0], found.arguments[1].tolist()) == ("_struct.Struct", "<q", [0, 1, 2])


@pytest.mark.parametrize(
    "gadget",
    [
        Calls(os.system, "true"),
        Calls(eval, "1"),
        Calls(getattr, Calls(__import__, "os"), "system"),
        Calls(torch.load, "x"),
        Calls(torch.storage._load_from_bytes, b"x"),  # type: ignore[no-untyped-call]
        Calls(np.load, "x"),
        Calls(np.ndarray, (2**40,)),
        Calls(torch.Tensor, 2**40),
        Calls(np.dtype, "O8", state=(3, "|", ("a",), {"a": 1}, None, 8, 8, 63)),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2026-01-01"], dtype="M8[D]"),
        {1, 2},
        io.StringIO("x"),
        np.random.default_rng(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_nothing_is_run_and_no_object_is_made(gadget: object, tmp_path: Path) -> None:
    path = tmp_path / "a.dp"
    path.write_bytes(pickle.dumps({"x": gadget}))
    with limits(2**29), pytest.raises(ForeignFileError, match=rf"^{path} "):
        read_pickle_file(path)
    torch.save({"x": gadget}, path)
    with limits(2**29), pytest.raises(ForeignFileError, match=rf"^{path}"):
        read_torch_file(path)


def array_of(shape: tuple[int, ...], code: str, content: object) -> Calls:
    """Describes an array as NumPy does."""
    described = Calls(np.dtype, code, False, True, state=(3, "<", None, None, None, -1, -1, 0))
    state = (1, shape, described, False, content)
    return Calls(np._core.multiarray._reconstruct, np.ndarray, (0,), b"b", state=state)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (array_of((2**40,), "i4", b"abcd"), r"holds an array int32 \[1099511627776\], of which it stores 4 bytes"),
        (array_of((1,), "U999999", b"a"), "of which it stores 1 bytes"),
        (array_of((2**40,), "O8", []), r"has an array \[1099511627776\] of objects with other content"),
        (array_of((-1,), "i4", b""), r"has a shape \(-1,\)"),
        (array_of((1,), "V8", bytes(8)), "has an array of dtype 'V8'"),
        (array_of((1,), "i4,i4", bytes(8)), "has an array of dtype 'i4,i4'"),
        (array_of((0, 2**62), "i4", b"abcd"), "of which it stores 4 bytes"),
    ],
)
def test_an_array_that_claims_more_than_it_stores_is_refused(array: Calls, problem: str) -> None:
    with limits(2**29), pytest.raises(PickledDataError, match=problem):
        pickled({"x": array}, size_bytes=10_000)


def test_values_in_each_other_are_not_walked_for_ever() -> None:
    value: list[object] = ["x"]
    for _ in range(60):
        value = [value] * 10
    with pytest.raises(PickledDataError, match="the values in it are more, or lie in each other without end"):
        pickled(value)
    deep: list[object] = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(PickledDataError, match="the values in it are more, or lie in each other without end"):
        pickled(deep)


@pytest.mark.parametrize("name", ["../../etc/passwd", "0/../0", "/etc/passwd"])
def test_a_storage_is_named_and_is_no_path(name: str) -> None:
    data = pack_pt({"x": claim_tensor(numel=16, size=(16,), stride=(1,))})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    entries["archive/data.pkl"] = entries["archive/data.pkl"].replace(
        b"X\x01\x00\x00\x000", b"X" + struct.pack("<I", len(name)) + name.encode(), 1
    )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for entry, content in entries.items():
            archive.writestr(entry, content)
    with pytest.raises(ForeignFileError, match="which the file does not have"):
        read_torch_bytes(out.getvalue(), "file")


def test_two_pickles_in_one_archive_are_refused() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({}, 2))
        archive.writestr("b/data.pkl", pickle.dumps({}, 2))
    with pytest.raises(ForeignFileError, match=r"it has 2 entries data\.pkl"):
        read_torch_bytes(out.getvalue(), "file")
