"""Changes documents as an attacker or a broken disk would: values of other kinds, sizes and depths, texts cut short."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.folders import EVIL

_DEEP: Any = "x"
for _ in range(400):
    _DEEP = [_DEEP]

_NUMBERS = [-1, 0, 1, 2, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, -1e308, 1e-320]
_TEXTS = ["", "x", "0", "nan", "-inf", "1e999", "²", "٣", "../../etc/passwd", "/etc/passwd", "${oc.env:HOME}", "0" * 64]
_ODD_TEXTS = [EVIL, "a\x00b", "\ud800", "A" * 5000, "9" * 5000, "[bold]x[/bold]", "<script>", "float2048", "1_000"]
_LISTS: list[Any] = [[], [[]], [None], [0, 2**62], [-1], [1] * 100, [""], [[1, 2]], {}, {"a": 1}, {"": {}}, {"0": "x"}]
VALUES = st.sampled_from([None, True, False, *_NUMBERS, *_TEXTS, *_ODD_TEXTS, *_LISTS, _DEEP])
_TOKENS = [
    "[" * 20000,
    '{"a":' * 20000,
    "\x00",
    "NaN",
    "-Infinity",
    "9" * 6000,
    "1e999",
    '"',
    "}",
    "\\ud800",
    "&a [*a]",
    "\ufeff",
]


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document but its root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, item in items:
        found += [(*place, key), *places(item, (*place, key))]
    return found


def near(value: Any) -> list[Any]:
    """Values that lie beside one."""
    if isinstance(value, bool) or value is None:
        return [0, "true", [value]]
    if isinstance(value, int | float):
        return [value + 1, -value, str(value), [value], value * 10**6, 10**400]
    if isinstance(value, str):
        return [value + EVIL, value[:-1], value * 2, [value], f"../{value}", {value: value}]
    if isinstance(value, list):
        return [value + value, value[:-1], value[::-1], [value], [*value, None], dict(enumerate(map(str, value)))]
    return [
        list(value.values()),
        list(value),
        {},
        dict.fromkeys(value),
        {f"{key}{EVIL}": value[key] for key in value},
    ]


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """A document with one to three changes."""
    result = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        found = places(result)
        if not found:
            return draw(VALUES)
        *above, last = draw(st.sampled_from(found))
        holder = result
        for step in above:
            holder = holder[step]
        act = draw(st.integers(0, 4))
        if act == 0:
            del holder[last]
        elif act == 1:
            holder[last] = copy.deepcopy(draw(st.sampled_from(near(holder[last]))))
        elif act == 2 and isinstance(holder, dict):
            holder[draw(st.sampled_from([EVIL, "", "x", "9" * 5000]))] = copy.deepcopy(draw(VALUES))
        else:
            holder[last] = copy.deepcopy(draw(VALUES))
    return result


@st.composite
def changed_text(draw: st.DrawFn, text: str) -> bytes:
    """A text that is cut, repeated, or has a token put in."""
    at = draw(st.integers(0, len(text)))
    token = draw(st.sampled_from(_TOKENS))
    made = draw(st.sampled_from([text[:at] + token + text[at:], text[:at], text[:at] + text[at // 2 :], token, ""]))
    return draw(
        st.sampled_from([made.encode("utf-8", "surrogatepass"), made.encode("utf-16"), made.encode() + b"\xff"])
    )
