"""Canonical JSON, digests worked out by other tools, and sealed documents."""

import json
import math
from enum import StrEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.support.digests import (
    JSON,
    canonical_json,
    check_json,
    compute_json_digest,
    iterate_leaves,
    open_sealed,
    seal,
)
from mock_scheduler.support.tensor_bytes import compute_tensor_digest


def test_canonical_json_is_sorted_without_spaces_in_ascii() -> None:
    assert canonical_json({"b": 0.1, "a": [1, None], "ü": True}) == '{"a":[1,null],"b":0.1,"\\u00fc":true}'


@pytest.mark.parametrize("value", [math.nan, math.inf, {"a": -math.inf}])
def test_canonical_json_refuses_what_json_does_not_have(value: JSON) -> None:
    with pytest.raises(ValueError, match=r"^Out of range float values are not JSON compliant"):
        canonical_json(value)


def test_digests_are_those_of_sha256sum() -> None:
    # printf '{"a":1}' | sha256sum
    assert compute_json_digest({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    # printf 'int8[2]\\x01\\x02' | sha256sum
    expected = "aa678146e95a2a3297cb0a5c22094f472fa1fa5b474d972e8035a57f0aefefb0"
    assert compute_tensor_digest(torch.tensor([1, 2], dtype=torch.int8)) == expected


def test_a_tensors_digest_covers_type_and_shape() -> None:
    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(0), torch.zeros(0, 1)]
    assert len({compute_tensor_digest(tensor) for tensor in zeros}) == len(zeros)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_sealed_document_opens_in_any_layout(indent: int | None) -> None:
    document = {"b": [1, "two"], "a": {"c": None}}
    assert open_sealed(json.dumps(seal(document), indent=indent)) == document


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a":1', "is not JSON: Expecting ',' delimiter: line 1 column 7 (char 6)"),
        (b"\xff", "is not JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        ("[1]", "is of type list, expected an object"),
        ("{}", "does not match its digest"),
        ('{"a":1,"digest":1}', "does not match its digest"),
        ('{"a":NaN,"digest":""}', "does not match its digest"),
        (canonical_json(seal({"a": 1})).replace('"a":1', '"a":2'), "does not match its digest"),
        (canonical_json(seal({"a": 1})).replace('"a":1', '"a":true'), "does not match its digest"),
    ],
)
def test_what_is_not_sealed_is_refused(text: str | bytes, problem: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is asserted
        open_sealed(text)
    assert str(caught.value) == problem


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^is not JSON: maximum recursion depth exceeded"):
        open_sealed("[" * 100_000)


def test_a_digest_is_that_of_the_values_whatever_view_they_are() -> None:
    """A conjugate view was refused by torch with a RuntimeError."""
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert compute_tensor_digest(values.conj()) == compute_tensor_digest(values.conj().resolve_conj())
    assert compute_tensor_digest(values.conj().imag) == compute_tensor_digest(torch.tensor([-2.0, 4.0]))
    assert compute_tensor_digest(torch.tensor([1.5]).expand(4)[:1]) == compute_tensor_digest(torch.tensor([1.5]))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(JSON_VALUES)
def test_what_is_accepted_comes_back_from_json_as_it_was(value: JSON) -> None:
    check_json(value, "x")
    found = json.loads(canonical_json(value))
    assert (found, repr(found)) == (value, repr(value)) or canonical_json(found) == canonical_json(value)


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"cursors": {0: 1, True: 2}}, "x.cursors: key 0 is int; key True is bool; JSON has text keys only"),
        ({None: 1}, "x: key None is NoneType; JSON has text keys only"),
        ({"a": [1, (2,)]}, "x.a[1] is a tuple, which would come back as a list; make it one"),
        ([math.inf, {"b": math.nan}], "x[0] is inf; JSON has no NaN and no infinity; x[1].b is nan; JSON has no NaN"),
        (np.float64(1.0), "x is of type numpy.float64; expected a dict, list, text, number, bool or None"),
        ([np.int64(1)], "x[0] is of type numpy.int64; expected"),
        (Colour.RED, "x is of type tests.support.test_digests.Colour; expected"),
        ({Colour.RED: 1}, "x: key <Colour.RED: 'red'> is tests.support.test_digests.Colour; JSON has text keys only"),
        ({1}, "x is of type set; expected"),
        ([2**20_000], "x[0] is an integer of more than 14000 bits"),
    ],
    ids=range(10),
)
def test_what_json_would_change_is_refused_by_name(value: object, problem: str) -> None:
    """Python's encoder makes texts of number keys and lists of tuples, and a replay went on with those."""
    with pytest.raises(ValueError, match="x") as caught:
        check_json(value, "x")
    assert str(caught.value).startswith(problem)


def test_values_that_are_only_compared_may_be_of_subclasses() -> None:
    check_json({"a": (1, np.float64(2.0)), Colour.RED: Colour.RED}, "x", is_exact=False)
    for value, problem in (
        ({1: 2}, "x: key 1 is int"),
        ((math.nan,), "x[0] is nan"),
        ([np.float32(1)], "x[0] is of type"),
    ):
        with pytest.raises(ValueError, match="x") as caught:
            check_json(value, "x", is_exact=False)
        assert str(caught.value).startswith(problem)


@pytest.mark.parametrize("is_exact", [True, False])
def test_what_is_too_deep_or_holds_itself_is_told(is_exact: bool) -> None:
    """It was a RecursionError."""
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    endless: dict[str, object] = {}
    endless["a"] = [endless, endless]
    for value in (deep, endless):
        with pytest.raises(ValueError, match=r"^x has more than 100 levels of lists and objects in each other$"):
            check_json(value, "x", is_exact=is_exact)


def test_leaves_are_named_by_dotted_keys_and_an_empty_mapping_is_one() -> None:
    value = {"a": {"b": 1, "c": {}}, "d": [{"e": 1}], "f": None}
    assert list(iterate_leaves(value)) == [("a.b", 1), ("a.c", {}), ("d", [{"e": 1}]), ("f", None)]
    assert list(iterate_leaves({"a": 1}, "x")) == [("x.a", 1)]
    assert (list(iterate_leaves({})), list(iterate_leaves({}, "x"))) == ([], [("x", {})])
