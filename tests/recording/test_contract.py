"""The contract: every difference is told with both values, and what is stored comes back."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.errors import ContractError
from mock_scheduler.recording.contract import Contract, ContractField, Match, Rule, check_contract
from mock_scheduler.recording.manifest import (
    MANIFEST_FORMAT,
    MANIFEST_VERSION,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from mock_scheduler.recording.sealed import encode_sealed
from mock_scheduler.support.digests import JSON, canonical_json
from tests.recording.builders import make_contract


def one_field(value: JSON, rule: Rule, name: str = "exp_name", *, match: Match = Match.EQUAL) -> Contract:
    return Contract([ContractField(name=name, value=value, rule=rule, advice="Do this.", match=match)])


def manifest_of(contract: Contract) -> Manifest:
    return Manifest(run_id="run-1", contract=contract, provenance={})


def stored_and_read(contract: Contract) -> Contract:
    """The contract out of the file that it was stored in."""
    return decode_manifest(encode_manifest(manifest_of(contract)), source="x").contract


def line_of(recorded: JSON, current: JSON, match: Match = Match.EQUAL, *, rule: Rule = Rule.MUST_MATCH) -> str:
    """What is said about one field ``f`` of two values."""
    recorded_contract = one_field(recorded, rule, "f", match=match)
    (difference,) = one_field(current, rule, "f", match=match).differences(recorded_contract)
    return difference.describe()


def message_of(recorded: JSON, current: JSON, match: Match) -> str:
    """The whole error that a broken contract of one field raises."""
    with pytest.raises(ContractError) as caught:
        check_contract(
            one_field(recorded, Rule.MUST_MATCH, "f", match=match),
            one_field(current, Rule.MUST_MATCH, "f", match=match),
            "error",
            source="./x",
        )
    return str(caught.value)


EXPECTED = (
    "[Rollout Mock] This run breaks the contract of ./x in 3 fields:\n"
    "  sequence_length: recorded 64, current 128. Set sequence_length to the recorded value.\n"
    '  vocab_size: recorded 16, current "16" (recorded a number, current a text). '
    "Set vocab_size to the recorded value.\n"
    '  map: recorded {"p":0.8}, current missing. Set map to the recorded value.'
)


def test_all_differing_fields_are_listed_with_both_values_and_the_advice() -> None:
    recorded, current = make_contract(map={"p": 0.8}), make_contract(sequence_length=128, vocab_size="16")
    with pytest.raises(ContractError) as caught:
        check_contract(recorded, current, "error", source="./x")
    assert str(caught.value) == EXPECTED


def test_warn_logs_the_same_text_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    recorded, current = make_contract(map={"p": 0.8}), make_contract(sequence_length=128, vocab_size="16")
    with caplog.at_level(logging.WARNING):
        differences = check_contract(recorded, current, "warn", source="./x")
    assert caplog.messages == [EXPECTED]
    assert [difference.name for difference in differences] == ["sequence_length", "vocab_size", "map"]


def test_fields_that_may_differ_are_returned_and_do_not_stop() -> None:
    differences = check_contract(one_field("tp1", Rule.MAY_DIFFER), one_field("tp2", Rule.MAY_DIFFER), "error")
    assert [difference.describe() for difference in differences] == ['exp_name: recorded "tp1", current "tp2"']
    assert not differences[0].is_blocking


def test_a_field_that_must_differ_and_does_not_is_an_error() -> None:
    same = one_field("run", Rule.MUST_DIFFER)
    with pytest.raises(ContractError) as caught:
        check_contract(same, same, "error", source="./x")
    assert str(caught.value) == (
        "[Rollout Mock] This run breaks the contract of ./x in 1 field:\n"
        '  exp_name: recorded "run", current "run" (must differ). Do this.'
    )
    assert check_contract(same, one_field("other", Rule.MUST_DIFFER), "error") == ()
    assert check_contract(Contract([]), same, "error") == ()


@pytest.mark.parametrize(("recorded", "current"), [(1, 1.0), (1, True), (None, 0), ([1, 2], [2, 1])])
def test_values_are_equal_only_as_json_text(recorded: object, current: object) -> None:
    differences = one_field(current, Rule.MUST_MATCH).differences(one_field(recorded, Rule.MUST_MATCH))
    assert len(differences) == 1


def test_equal_contracts_have_no_differences() -> None:
    assert make_contract().differences(make_contract()) == []
    assert make_contract().differences(stored_and_read(make_contract())) == []


def test_the_order_of_the_keys_of_a_value_does_not_matter() -> None:
    a, b = one_field({"x": 1, "y": 2}, Rule.MUST_MATCH), one_field({"y": 2, "x": 1}, Rule.MUST_MATCH)
    assert a.differences(b) == []


def test_a_field_named_twice_or_no_json_is_refused() -> None:
    field = ContractField(name="seed", value=1, rule=Rule.MUST_MATCH, advice="")
    with pytest.raises(ContractError, match=r"fields named twice: \['seed'\]"):
        Contract([field, field])
    with pytest.raises(ContractError, match="value of 'exp_name' is nan; JSON has no NaN"):
        one_field(float("nan"), Rule.MUST_MATCH)


def test_a_contract_of_plain_values_must_match_in_all_of_them() -> None:
    contract = Contract.of({"model": "tiny", "seed": 1})
    assert Contract.of({"seed": 1, "model": "tiny"}).differences(contract) == []
    with pytest.raises(ContractError) as caught:
        check_contract(contract, Contract.of({"model": "large", "seed": 1}), "error", source="./x")
    assert str(caught.value) == (
        "[Rollout Mock] This run breaks the contract of ./x in 1 field:\n"
        '  model: recorded "tiny", current "large". Set model as in the recording run.'
    )


@pytest.mark.parametrize("match", Match)
def test_a_contract_of_any_match_survives_as_json(match: Match) -> None:
    values: dict[Match, JSON] = {Match.AT_MOST: 3, Match.SUBSET: [1], Match.VERSION: "1.2", Match.DIGEST: "ab" * 32}
    contract = one_field(values.get(match, {"x": 1}), Rule.MUST_MATCH, match=match)
    assert stored_and_read(contract).fields == contract.fields
    (stored,) = json.loads(encode_manifest(manifest_of(contract)))["contract"]
    assert stored["match"] == match.value


def test_a_field_recorded_before_there_were_matches_is_compared_as_equal() -> None:
    old = {"name": "seed", "value": 1, "rule": "must_match", "advice": "Set seed."}
    document = {"run_id": "run-1", "contract": [old], "provenance": {}}
    data = encode_sealed(document, format_name=MANIFEST_FORMAT, version=MANIFEST_VERSION)
    (field,) = decode_manifest(data, source="x").contract.fields
    assert field == ContractField(name="seed", value=1, rule=Rule.MUST_MATCH, advice="Set seed.", match=Match.EQUAL)


def test_the_match_of_the_current_run_counts() -> None:
    recorded = one_field("2.13.0+cpu", Rule.MUST_MATCH)
    (difference,) = one_field("2.13.0+cu130", Rule.MUST_MATCH, match=Match.VERSION).differences(recorded)
    assert not difference.is_blocking


def test_a_changed_list_says_which_items_moved_and_where_it_begins() -> None:
    assert message_of(["a", "b", "c", "d"], ["a", "c", "e", "d"], Match.EQUAL) == (
        "[Rollout Mock] This run breaks the contract of ./x in 1 field:\n"
        '  f: recorded ["a","b","c","d"], current ["a","c","e","d"] '
        '(added "e"; removed "b"; first difference at index 1). Do this.'
    )


def test_a_number_above_the_recorded_one_says_by_how_much() -> None:
    assert message_of(4, 8, Match.AT_MOST) == (
        "[Rollout Mock] This run breaks the contract of ./x in 1 field:\n"
        "  f: recorded 4, current 8 (4 more than recorded). Do this."
    )


def test_another_release_is_refused_and_another_build_of_the_same_only_reported() -> None:
    assert message_of("2.13.0+cpu", "2.14.0+cpu", Match.VERSION) == (
        "[Rollout Mock] This run breaks the contract of ./x in 1 field:\n"
        '  f: recorded "2.13.0+cpu", current "2.14.0+cpu" (other release). Do this.'
    )
    assert (
        line_of("2.13.0+cpu", "2.13.0+cu130", Match.VERSION)
        == 'f: recorded "2.13.0+cpu", current "2.13.0+cu130" (same release, other build)'
    )


def test_an_item_that_was_not_recorded_is_refused_by_name() -> None:
    assert message_of(["a", "b"], ["b", "c"], Match.SUBSET) == (
        "[Rollout Mock] This run breaks the contract of ./x in 1 field:\n"
        '  f: recorded ["a","b"], current ["b","c"] (not recorded: "c"). Do this.'
    )


def test_digests_are_shown_by_their_start() -> None:
    assert message_of("0123456789abcdef" * 4, "fedcba9876543210" * 4, Match.DIGEST) == (
        "[Rollout Mock] This run breaks the contract of ./x in 1 field:\n"
        "  f: recorded 0123456789ab, current fedcba987654 (other content). Do this."
    )


@pytest.mark.parametrize(
    ("match", "recorded", "current", "expected"),
    [
        (Match.AT_MOST, 4, 2, "recorded 4, current 2 (2 less than recorded)"),
        (Match.AT_MOST, 4, 4.0, "recorded 4, current 4.0 (recorded an integer, current a float)"),
        (Match.SUBSET, ["a", "b"], ["b"], 'recorded ["a","b"], current ["b"] (without "a")'),
        (
            Match.SUBSET,
            ["a", "b"],
            ["b", "a", "a"],
            'recorded ["a","b"], current ["b","a","a"] (the same items, in another order or number)',
        ),
        (Match.VERSION, "2.13.0", "2.13.1", 'recorded "2.13.0", current "2.13.1" (same release, other patch)'),
        (
            Match.VERSION,
            "2.9.0a0+50eac811a6.nv25.09",
            "2.9.0",
            'recorded "2.9.0a0+50eac811a6.nv25.09", current "2.9.0" (same release, other patch and build)',
        ),
    ],
)
def test_what_matches_without_being_the_same_is_reported_and_does_not_stop(
    match: Match, recorded: JSON, current: JSON, expected: str
) -> None:
    found = check_contract(
        one_field(recorded, Rule.MUST_MATCH, "f", match=match),
        one_field(current, Rule.MUST_MATCH, "f", match=match),
        "error",
    )
    assert [difference.describe() for difference in found] == [f"f: {expected}"]


@pytest.mark.parametrize(
    ("match", "recorded", "current"),
    [
        (Match.AT_MOST, 4, 5),
        (Match.AT_MOST, "4", 4),
        (Match.SUBSET, ["a"], ["a", "b"]),
        (Match.SUBSET, [1], [True]),
        (Match.VERSION, "2.13.0", "2.14.0"),
        (Match.VERSION, "absent", "2.14.0"),
        (Match.DIGEST, "0" * 64, "0" * 63 + "1"),
    ],
)
def test_what_does_not_match_stops(match: Match, recorded: JSON, current: JSON) -> None:
    """The recorded side may hold anything: a recording is not refused for what it holds, but for the difference."""
    contract = one_field(current, Rule.MUST_MATCH, match=match)
    assert [item.is_blocking for item in contract.differences(one_field(recorded, Rule.MUST_MATCH))] == [True]


@pytest.mark.parametrize(
    ("recorded", "current", "reason"),
    [
        (42, 43, ""),
        (100000, 100004, "4 more than recorded"),
        (0.1, 0.1000001, "1e-07 more than recorded"),
        (1, 1.0, "recorded an integer, current a float"),
        (1, "1", "recorded a number, current a text"),
        (1, True, "recorded a number, current a boolean"),
        ([1], {"a": 1}, "recorded a list, current a mapping"),
        (None, 0, ""),
        (False, True, ""),
        ([1, 2], [2, 1], "another order, first at index 0"),
        ([1, 2], [1, 2, 2], "added 2; first difference at index 2"),
        ([0], [1, 2, 3, 4, 5, 0], "added 1, 2, 3, 4 and 1 more; first difference at index 0"),
        ({"a": {"b": 1}, "c": 2}, {"a": {"b": 2}, "d": 1}, "differs in a.b; added d; removed c"),
        ("short", "other", ""),
        ("x" * 44 + "left", "x" * 44 + "right", 'first difference at character 45: recorded "left", current "right"'),
        ("x" * 44, "x" * 44 + "y", 'first difference at character 45: recorded nothing, current "y"'),
    ],
)
def test_the_reason_says_what_the_two_values_do_not(recorded: JSON, current: JSON, reason: str) -> None:
    (difference,) = one_field(current, Rule.MUST_MATCH).differences(one_field(recorded, Rule.MUST_MATCH))
    assert difference.reason == reason


def test_a_long_value_is_cut_and_says_how_long_it_was() -> None:
    text = "a" * 130
    line = line_of(text, text + "b")
    assert line == (
        f'f: recorded "{"a" * 119}… (132 characters), current "{"a" * 119}… (133 characters) '
        '(first difference at character 131: recorded nothing, current "b"). Do this.'
    )


@pytest.mark.parametrize(
    ("match", "value", "text"),
    [
        (Match.AT_MOST, True, "is true; match at_most compares a number"),
        (Match.SUBSET, "ab", 'is "ab"; match subset compares a list'),
        (Match.VERSION, 2, "is 2; match version compares a text"),
        (Match.DIGEST, "no digest", 'is "no digest"; match digest compares a hexadecimal digest'),
    ],
)
def test_a_value_that_its_match_cannot_compare_is_refused(match: Match, value: JSON, text: str) -> None:
    with pytest.raises(ContractError) as caught:
        one_field(value, Rule.MUST_MATCH, match=match)
    assert str(caught.value) == f"contract: value of 'exp_name' {text}"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=60),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(recorded=JSON_VALUES, current=JSON_VALUES, rule=st.sampled_from(list(Rule)))
def test_any_two_values_differ_exactly_where_their_json_does(recorded: JSON, current: JSON, rule: Rule) -> None:
    """Describing a difference must never fail, whatever the values, and must say that there is one."""
    is_same = canonical_json(recorded) == canonical_json(current)
    differences = one_field(current, rule).differences(one_field(recorded, rule))
    assert len(differences) == (is_same if rule is Rule.MUST_DIFFER else not is_same)
    assert all(difference.describe().startswith("exp_name: recorded ") for difference in differences)


@given(st.lists(st.integers(-3, 3), max_size=4), st.lists(st.integers(-3, 3), max_size=4))
def test_a_subset_matches_exactly_where_every_item_was_recorded(recorded: list[int], current: list[int]) -> None:
    contract = one_field(current, Rule.MUST_MATCH, match=Match.SUBSET)
    differences = contract.differences(one_field(recorded, Rule.MUST_MATCH, match=Match.SUBSET))
    assert any(difference.is_blocking for difference in differences) == (not set(current) <= set(recorded))


def test_a_value_that_json_would_change_is_refused_and_a_tuple_is_a_list() -> None:
    """A key that is a number was equal to its text, and a value that is too deep a RecursionError."""
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value, problem in (
        ({"a": {1: 2}}, "value of 'x'.a: key 1 is int; JSON has text keys only"),
        (deep, "value of 'x' has more than 100 levels of lists and objects in each other"),
    ):
        with pytest.raises(ContractError) as caught:
            Contract.of({"x": value})
        assert str(caught.value) == f"contract: {problem}"
    assert Contract.of({"x": (1, 2)}).differences(Contract.of({"x": [1, 2]})) == []


def test_a_mapping_that_became_empty_is_told_by_its_key() -> None:
    recorded, current = Contract.of({"x": {"a": {"b": 1}}}), Contract.of({"x": {"a": {}}})
    assert [difference.reason for difference in current.differences(recorded)] == ["added a; removed a.b"]
