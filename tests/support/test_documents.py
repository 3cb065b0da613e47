"""Documents: what is stored comes back, and any other content is told by field, found value and expected value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest

from mock_scheduler.support.digests import JSON
from mock_scheduler.support.documents import AsRow, Count, Document


class Colour(StrEnum):
    """As a contract's rules are."""

    RED = "red"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Stored as a row."""

    start: int
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A document of all kinds of fields."""

    number: Count
    colour: Colour
    spans: tuple[Annotated[Span, AsRow()], ...]
    mode: Literal["train", "val"] = "train"
    free: JSON = None


PAGES = Document[Page](Page)
PAGE = Page(number=3, colour=Colour.RED, spans=(Span(start=-1, names=("a", "b")),), free={"x": [1, 2.5, None]})
STORED = {
    "number": 3,
    "colour": "red",
    "spans": [[-1, ["a", "b"]]],
    "mode": "train",
    "free": {"x": [1, 2.5, None]},
}


def test_a_document_has_its_fields_as_keys_in_their_order() -> None:
    assert PAGES.dump(PAGE) == STORED
    assert list(PAGES.dump(PAGE)) == list(STORED)


def test_a_document_comes_back_as_it_was() -> None:
    assert PAGES.load(STORED) == PAGE


def test_keys_of_a_later_release_are_passed_over_and_defaults_stand_for_those_of_an_earlier_one() -> None:
    content = {name: value for name, value in STORED.items() if name != "mode"}
    assert PAGES.load({**content, "added": 1}) == PAGE


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"number": True}, "number is True: expected a whole number"),
        ({"number": "3"}, "number is '3': expected a whole number"),
        ({"number": 3.0}, "number is 3.0: expected a whole number"),
        ({"number": -1}, "number is -1: expected at least 0"),
        ({"colour": "blue"}, "colour is 'blue': expected 'red'"),
        ({"mode": "test"}, "mode is 'test': expected 'train' or 'val'"),
        ({"spans": [[-1]]}, "spans[0][1] is missing"),
        ({"spans": [[1, ["a", 7]]]}, "spans[0][1][1] is 7: expected a text"),
        ({"spans": 5}, "spans is 5: expected a list"),
        ({"number": -1, "spans": 5}, "number is -1: expected at least 0; spans is 5: expected a list"),
    ],
)
def test_other_content_is_told_by_field_found_and_expected(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        PAGES.load({**STORED, **change})


def test_messages_name_the_place_of_the_content_in_its_file() -> None:
    with pytest.raises(ValueError, match=r"^page\.number is missing; page\.colour is missing; page\.spans is missing$"):
        PAGES.load({}, at="page")
    with pytest.raises(ValueError, match=r"^page is \[\]: expected an object$"):
        PAGES.load([], at="page")
