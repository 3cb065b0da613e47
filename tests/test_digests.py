"""Canonical JSON, digests worked out by other tools, and sealed documents."""

import json
import math

import pytest
import torch

from mock_scheduler.digests import JSON, canonical_json, compute_json_digest, compute_tensor_digest, open_sealed, seal


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
