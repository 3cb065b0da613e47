import json
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.adapters.plain_values import from_json, to_json
from mock_scheduler.errors import BatchError
from mock_scheduler.support.digests import canonical_json

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    plain | st.binary() | st.sampled_from([math.nan, math.inf, -math.inf]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.text(), inner)
    ),
    max_leaves=10,
)


@given(values)
def test_any_python_value_comes_back_with_its_types(value: object) -> None:
    written = to_json(value, "x")
    canonical_json(written)
    assert repr(from_json(written)) == repr(value)


@pytest.mark.parametrize("value", [1, "$x", [1.5, None], {"a": {"b": []}}])
def test_json_stays_as_it_is(value: object) -> None:
    assert to_json(value, "x") == value


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        np.str_(""),
        np.str_("é"),
        np.bytes_(b""),
        np.datetime64("2026-01-02"),
        np.array([[1, 2], [3, 4]], dtype=">i2"),
        np.array([np.nan, -0.0], dtype=np.float16),
        np.zeros((0, 3)),
        np.array(2.5),
        np.array([None, [1], "x"], dtype=object),
    ],
    ids=repr,
)
def test_numpy_values_come_back_with_dtype_and_shape(value: np.generic | np.ndarray) -> None:
    found = from_json(to_json(value, "x"))
    assert type(found) is type(value)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert repr(found.tolist()) == repr(value.tolist())


@pytest.mark.parametrize(
    "value", [torch.tensor([[1.5, float("nan")]], dtype=torch.bfloat16), torch.tensor(3), torch.zeros(0, 2)], ids=repr
)
def test_tensors_come_back_with_dtype_and_shape(value: torch.Tensor) -> None:
    found = from_json(to_json({"deep": [value]}, "x"))["deep"][0]
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert repr(found.tolist()) == repr(value.tolist())


def test_keys_that_look_like_ours_come_back() -> None:
    value = {"$tuple": [1], "a": {"$float": "nan"}}
    assert from_json(to_json(value, "x")) == value


class Unknown:
    pass


@pytest.mark.parametrize("value", [Unknown(), [Unknown()], {"a": (Unknown(),)}, np.array([Unknown()])])
def test_what_it_does_not_know_is_refused(value: object) -> None:
    with pytest.raises(BatchError) as caught:
        to_json(value, "field 'x', row 2,")
    assert str(caught.value).startswith("field 'x', row 2, holds a value of type ")
    assert ".Unknown, which cannot be recorded; expected JSON values, tuples, bytes, NumPy" in str(caught.value)


def test_a_subclass_is_not_taken_for_its_base() -> None:
    class Count(int):
        pass

    with pytest.raises(BatchError, match="Count, which cannot be recorded"):
        to_json(Count(3), "x")


def test_what_it_did_not_write_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown value \$pickle"):
        from_json({"$pickle": "x"})


def through_a_file(value: object) -> object:
    return from_json(json.loads(canonical_json(to_json(value, "x"))))


def test_the_order_of_keys_is_kept_through_a_file() -> None:
    """A file's keys are sorted, so that a dict came back in another order."""
    value = {"b": {"z": 1, "a": 2}, "a": [{"d": 1, "c": {}}]}
    assert repr(through_a_file(value)) == repr(value)
    assert to_json({"a": 1, "b": 2}, "x") == {"a": 1, "b": 2}


@pytest.mark.parametrize("value", [np.bytes_(b"a\0"), np.bytes_(b"\0"), np.str_("a\0\0"), np.str_("\ud800")], ids=repr)
def test_nulls_at_the_end_of_a_numpy_text_are_kept(value: np.generic) -> None:
    """They were lost, since the text was read as an element of an array."""
    found = through_a_file(value)
    assert (type(found), found, repr(found)) == (type(value), value, repr(value))


@pytest.mark.parametrize("bits", ["7ff8000000000000", "fff8000000000000", "7ff8000000000123"])
def test_the_bits_of_a_nan_are_kept(bits: str) -> None:
    value = struct.unpack(">d", bytes.fromhex(bits))[0]
    assert struct.pack(">d", through_a_file(value)).hex() == bits


def test_a_value_that_is_too_deep_is_refused() -> None:
    """It was a RecursionError."""
    value: object = None
    for kind in range(100_000):
        value = [value] if kind % 2 else {"a": value}
    with pytest.raises(BatchError, match=r"^field x holds more than 100 levels of values in each other$"):
        to_json(value, "field x")


@pytest.mark.parametrize("value", [torch.empty(2, device="meta"), torch.eye(2).to_sparse()], ids=["meta", "sparse"])
def test_a_tensor_without_plain_values_is_refused(value: torch.Tensor) -> None:
    with pytest.raises(BatchError, match=r"^field x holds a value of type torch.Tensor, which cannot be recorded"):
        to_json([value], "field x")
