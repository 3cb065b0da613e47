"""How one value of the contract is compared with the recorded one, and why the two do not match.

Contract: values are compared as canonical JSON, so 1 is not 1.0 and not true. A reason is empty where the two values,
which are printed beside it, already say all of it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeGuard

from mock_scheduler.support.digests import JSON, canonical_json, iterate_leaves

_DIGEST_LENGTH = 12  # shown of a digest
_SHOWN_LENGTH = 120  # shown of any value
_SHORT_TEXT = 40
_SHORT_NUMBER = 5  # digits that are compared at a glance
_MAX_NAMED = 4  # items or keys named in one reason
_EXCERPT = 8  # characters shown from a text's first difference

_HEX = re.compile(r"[0-9a-f]{16,}")
# 2.13.0, 2.13.0+cu130, 0.16.1rc0; the release is the first two numbers.
_VERSION = re.compile(r"(?P<release>\d+(?:\.\d+)?)(?P<patch>(?:\.\d+)*(?:[.-]?[a-z]+\d*)*)(?:\+(?P<build>.+))?")


class Match(StrEnum):
    """When a value matches the recorded one.

    ``EQUAL``: the same JSON. ``VERSION``: the same release, the first two numbers of a version; patch and
    build (``+cu130``) are reported and may differ. ``AT_MOST``: a number that is no larger. ``SUBSET``: a list of
    whose items are all in the recorded one. ``DIGEST``: equal hexadecimal digests, shown by their start.
    """

    EQUAL = "equal"
    VERSION = "version"
    AT_MOST = "at_most"
    SUBSET = "subset"
    DIGEST = "digest"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Holds the comparison of two values of different JSON: whether they match all the same, and their difference."""

    is_match: bool
    reason: str


def check_value(match: Match, value: JSON) -> None:
    """Raise ``ValueError`` that goes on from the value's name where ``match`` cannot compare such a value."""
    expected = {
        Match.VERSION: (isinstance(value, str), "a text"),
        Match.AT_MOST: (_is_number(value), "a number"),
        Match.SUBSET: (_is_list(value), "a list"),
        Match.DIGEST: (_is_digest(value), "a hexadecimal digest"),
    }
    is_fine, kind = expected.get(match, (True, ""))
    if not is_fine:
        raise ValueError(f"is {show(value)}; match {match.value} compares {kind}")


def compare_values(match: Match, recorded: JSON, current: JSON) -> Comparison:
    """Compare two values that are not the same JSON."""
    # Before the kinds: 1 and 1.0 are other JSON, and yet the one is at most the other.
    if match is Match.AT_MOST and _is_number(recorded) and _is_number(current):
        return _compare_numbers(recorded, current)
    kinds = (_kind(recorded), _kind(current))
    if kinds[0] != kinds[1]:
        return Comparison(is_match=False, reason=_changed_kind(*kinds))
    if match is Match.VERSION:
        return _compare_versions(str(recorded), str(current))
    if match is Match.SUBSET and _is_list(recorded) and _is_list(current):
        return _compare_subset(recorded, current)
    if match is Match.DIGEST and _is_digest(recorded) and _is_digest(current):
        return Comparison(is_match=False, reason="other content")
    return Comparison(is_match=False, reason=_reason(recorded, current))


def show(value: JSON, match: Match = Match.EQUAL) -> str:
    """A value as it is printed: canonical JSON, a long one cut with its length, a digest by its start."""
    if match is Match.DIGEST and _is_digest(value):
        return str(value)[:_DIGEST_LENGTH]
    text = canonical_json(value)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}… ({len(text)} characters)"


def _is_number(value: JSON) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: JSON) -> TypeGuard[Sequence[JSON]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_digest(value: JSON) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _kind(value: JSON) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a float"
    if isinstance(value, str):
        return "a text"
    return "a list" if isinstance(value, Sequence) else "a mapping"


def _changed_kind(recorded: str, current: str) -> str:
    if "null" in (recorded, current):
        return ""
    numbers = ("an integer", "a float")
    if recorded in numbers and current not in numbers:
        recorded = "a number"
    elif current in numbers and recorded not in numbers:
        current = "a number"
    return f"recorded {recorded}, current {current}"


def _reason(recorded: JSON, current: JSON) -> str:
    if isinstance(recorded, str):
        return _text_reason(recorded, str(current))
    if isinstance(recorded, Mapping) and isinstance(current, Mapping):
        return _mapping_reason(recorded, current)
    if _is_list(recorded) and _is_list(current):
        return _list_reason(recorded, current)
    is_long = max(len(canonical_json(recorded)), len(canonical_json(current))) > _SHORT_NUMBER
    return _number_change(recorded, current) if is_long and _is_number(recorded) and _is_number(current) else ""


def _number_change(recorded: int | float, current: int | float) -> str:
    change = abs(current - recorded)
    amount = str(change) if isinstance(change, int) else f"{change:.3g}"
    return f"{amount} {'more' if current > recorded else 'less'} than recorded"


def _compare_numbers(recorded: int | float, current: int | float) -> Comparison:
    if current == recorded:
        return Comparison(is_match=True, reason=_changed_kind(_kind(recorded), _kind(current)))
    return Comparison(is_match=current < recorded, reason=_number_change(recorded, current))


def _text_reason(recorded: str, current: str) -> str:
    if max(len(recorded), len(current)) <= _SHORT_TEXT:
        return ""
    at = next(
        (index for index, (a, b) in enumerate(zip(recorded, current, strict=False)) if a != b),
        min(len(recorded), len(current)),
    )
    excerpts = [json.dumps(text[at : at + _EXCERPT]) if text[at:] else "nothing" for text in (recorded, current)]
    return f"first difference at character {at + 1}: recorded {excerpts[0]}, current {excerpts[1]}"


def _list_reason(recorded: Sequence[JSON], current: Sequence[JSON]) -> str:
    before, after = list(map(canonical_json, recorded)), list(map(canonical_json, current))
    moved = (
        ("added", list((Counter(after) - Counter(before)).elements())),
        ("removed", list((Counter(before) - Counter(after)).elements())),
    )
    parts = [f"{word} {_listed(items)}" for word, items in moved if items]
    pairs = enumerate(zip(before, after, strict=False))
    at = next((index for index, (a, b) in pairs if a != b), min(len(before), len(after)))
    return "; ".join([*parts, f"{'first difference' if parts else 'another order, first'} at index {at}"])


def _compare_subset(recorded: Sequence[JSON], current: Sequence[JSON]) -> Comparison:
    before, after = (dict.fromkeys(map(canonical_json, items)) for items in (recorded, current))
    added, removed = [item for item in after if item not in before], [item for item in before if item not in after]
    if added:
        return Comparison(is_match=False, reason=f"not recorded: {_listed(added)}")
    if removed:
        return Comparison(is_match=True, reason=f"without {_listed(removed)}")
    return Comparison(is_match=True, reason="the same items, in another order or number")


def _mapping_reason(recorded: Mapping[str, JSON], current: Mapping[str, JSON]) -> str:
    before, after = (
        {key: canonical_json(leaf) for key, leaf in iterate_leaves(value)} for value in (recorded, current)
    )
    changed = [key for key in before if key in after and before[key] != after[key]]
    parts = (
        ("differs in", changed),
        ("added", [key for key in after if key not in before]),
        ("removed", [key for key in before if key not in after]),
    )
    return "; ".join(f"{word} {_listed(sorted(keys))}" for word, keys in parts if keys)


def _listed(items: Sequence[str]) -> str:
    shown = [item if len(item) <= _SHORT_TEXT else f"{item[:_SHORT_TEXT]}…" for item in items[:_MAX_NAMED]]
    more = len(items) - len(shown)
    return f"{', '.join(shown)} and {more} more" if more else ", ".join(shown)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    release: str
    patch: str
    build: str


def _parse_version(text: str) -> _Version | None:
    found = _VERSION.fullmatch(text)
    return found and _Version(release=found["release"], patch=found["patch"], build=found["build"] or "")


def _compare_versions(recorded: str, current: str) -> Comparison:
    before, after = _parse_version(recorded), _parse_version(current)
    if before is None or after is None:
        return Comparison(is_match=False, reason="")
    if before.release != after.release:
        return Comparison(is_match=False, reason="other release")
    parts = {"patch": before.patch != after.patch, "build": before.build != after.build}
    return Comparison(is_match=True, reason=f"same release, other {' and '.join(n for n, d in parts.items() if d)}")
