"""Sets of steps as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.config.steps import StepRanges

RANGES = st.lists(
    st.tuples(st.integers(0, 30), st.none() | st.integers(0, 8)).map(
        lambda pair: f"{pair[0]}-" if pair[1] is None else f"{pair[0]}-{pair[0] + pair[1]}"
    ),
    max_size=5,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0-19, 40, 100-", "0-19, 40, 100-"),
        (7, "7"),
        ([0, 5, "10-19"], "0, 5, 10-19"),
        ("3, 1, 2", "1-3"),
        ("5-, 0-9", "0-"),
        ("4-4", "4"),
        ([], ""),
    ],
)
def test_equal_sets_have_one_text(value: object, text: str) -> None:
    assert str(StepRanges.parse(value)) == text


@pytest.mark.parametrize("value", ["", "x", "-1", "1--2", -1, True, 1.5, None, [None], "1;2"])
def test_what_is_no_set_of_steps_says_what_is_expected(value: object) -> None:
    with pytest.raises(ValueError, match="write steps and ranges, for example '0-19, 40, 100-' or"):
        StepRanges.parse(value)


def test_a_range_that_ends_before_it_begins_is_named() -> None:
    with pytest.raises(ValueError, match="range '9-3' ends before it begins"):
        StepRanges.parse("9-3")


@given(RANGES)
def test_a_set_reads_back_from_its_text_and_holds_what_its_ranges_say(ranges: list[str]) -> None:
    steps = StepRanges.parse(ranges)
    assert StepRanges.parse(str(steps) if ranges else []) == steps
    for step in range(45):
        bounds = [text.partition("-") for text in ranges]
        assert (step in steps) == any(int(a) <= step and (not b or step <= int(b)) for a, _, b in bounds)


@given(RANGES, RANGES)
def test_one_set_is_within_another_exactly_where_all_its_steps_are(inner: list[str], outer: list[str]) -> None:
    a, b = StepRanges.parse(inner), StepRanges.parse(outer)
    # No range that ends goes beyond 38, so that step 39 and all after it are alike.
    assert a.is_within(b) == all(step in b for step in range(45) if step in a)
