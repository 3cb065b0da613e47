import logging

import pytest

from mock_scheduler.digests import JSON
from mock_scheduler.errors import ContractError
from mock_scheduler.recording import Contract, ContractField, Rule, check_contract
from tests.recording.builders import make_contract


def one_field(value: JSON, rule: Rule, name: str = "exp_name") -> Contract:
    return Contract([ContractField(name=name, value=value, rule=rule, advice="Do this.")])


EXPECTED = (
    "[Rollout Mock] This run breaks the contract of ./x in 3 fields:\n"
    "  sequence_length: recorded 64, current 128. Set sequence_length to the recorded value.\n"
    '  vocab_size: recorded 16, current "16". Set vocab_size to the recorded value.\n'
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
    assert make_contract().differences(Contract.from_json(make_contract().as_json())) == []


def test_the_order_of_the_keys_of_a_value_does_not_matter() -> None:
    a, b = one_field({"x": 1, "y": 2}, Rule.MUST_MATCH), one_field({"y": 2, "x": 1}, Rule.MUST_MATCH)
    assert a.differences(b) == []


def test_a_field_named_twice_or_no_json_is_refused() -> None:
    field = ContractField(name="seed", value=1, rule=Rule.MUST_MATCH, advice="")
    with pytest.raises(ContractError, match=r"fields named twice: \['seed'\]"):
        Contract([field, field])
    with pytest.raises(ContractError, match="value of 'exp_name' is no JSON"):
        one_field(float("nan"), Rule.MUST_MATCH)
