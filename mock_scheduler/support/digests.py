"""Computes canonical JSON, digests over it, and documents that carry their own digest.

Contract: imports no torch; a change here changes the bytes of recordings and traces. A *sealed*
document is a JSON object whose ``digest`` is the SHA-256 of the canonical JSON of all the rest. A recording's values
are checked with ``check_json``, since Python's encoder turns values unknown to JSON into others without a word.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
else:
    # A document (``documents``) gives a field of this type back as it is; pydantic cannot follow a recursive alias.
    JSON = Any

#: How deep lists and objects may lie in each other; Python's encoder and decoder end at about ten times as much.
MAX_JSON_DEPTH = 100

#: How many lists and objects a document of a recording may hold.
MAX_JSON_CONTAINERS = 2**18
_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"')
_BRACKETS = re.compile(r"[\[{]")

_MAX_INT_BITS = 14_000  # of about 4200 digits; Python reads no more than 4300
_NO_CHILDREN: tuple[()] = ()


def canonical_json(value: JSON) -> str:
    """Returns the one ASCII text of a JSON value: sorted keys, no spaces, floats in full ``repr`` precision.

    Raises ``ValueError`` where the value holds NaN or an infinity, ``TypeError`` where it is not JSON.
    """
    # Every argument is part of the format of recordings and traces.
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def check_json(value: object, what: str, *, is_exact: bool = True) -> None:
    """Raise ``ValueError`` unless ``value`` comes back from JSON as it is; ``what`` names it in messages.

    Objects have text keys only, numbers are finite, and nothing lies deeper than ``MAX_JSON_DEPTH``. ``is_exact`` False
    is for values that are only compared: tuples count as lists there, and subclasses (an enum's texts, NumPy's float64)
    as their base types. The message lists every part that is wrong: ``meta 'a'.b[2] is nan; …``.
    """
    problems = list(_json_problems(value, what, is_exact=is_exact))
    if problems:
        raise ValueError("; ".join(problems))


def _json_problems(value: object, what: str, *, is_exact: bool) -> Iterator[str]:
    """Walks without recursion, since too deep a value must be told and not overflow the stack."""
    stack: list[tuple[object, str, int]] = [(value, what, 0)]
    while stack:
        item, where, depth = stack.pop()
        if depth > MAX_JSON_DEPTH:
            yield f"{what} has more than {MAX_JSON_DEPTH} levels of lists and objects in each other"
            return  # what holds itself has no end
        children, problem = _look_at(item, is_exact=is_exact)
        if problem:
            yield f"{where}{problem}"
        # The last one first, as the stack turns them round.
        stack.extend([(child, f"{where}{step}", depth + 1) for step, child in reversed(list(children))])


def _look_at(item: object, *, is_exact: bool) -> tuple[Iterable[tuple[str, object]], str]:
    """The values directly in a value, each with the end of its name, and the problem of the value itself, as text
    that goes on from its name."""
    kind = type(item) if is_exact else next((base for base in _JSON_TYPES if isinstance(item, base)), type(item))
    if kind is float:
        is_finite = isinstance(item, float) and math.isfinite(item)
        return _NO_CHILDREN, "" if is_finite else f" is {item}; JSON has no NaN and no infinity"
    if kind is int:
        is_short = isinstance(item, int) and item.bit_length() <= _MAX_INT_BITS
        return _NO_CHILDREN, "" if is_short else f" is an integer of more than {_MAX_INT_BITS} bits"
    if isinstance(item, Mapping) and kind is dict:
        wrong = [key for key in item if not (type(key) is str if is_exact else isinstance(key, str))]
        problem = "; ".join(f"key {key!r} is {_type_name(key)}" for key in wrong)
        inside = [(f".{key}", child) for key, child in item.items() if isinstance(key, str)]
        return inside, f": {problem}; JSON has text keys only" if wrong else ""
    if isinstance(item, list | tuple) and (kind is list or not is_exact):
        return [(f"[{index}]", child) for index, child in enumerate(item)], ""
    if kind in (bool, str, type(None)):
        return _NO_CHILDREN, ""
    if kind is tuple:
        return _NO_CHILDREN, " is a tuple, which would come back as a list; make it one"
    return _NO_CHILDREN, f" is of type {_type_name(item)}; expected a dict, list, text, number, bool or None"


#: bool before int, of which it is one.
_JSON_TYPES = (bool, int, float, str, dict, list, tuple, type(None))


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def count_containers(text: str) -> int:
    """Counts the lists and objects of a JSON text: what parsing takes memory for, up to 100 times their text."""
    count = text.count("[") + text.count("{")
    # Brackets inside of texts count for nothing; they are looked for only where they could matter.
    if count > MAX_JSON_CONTAINERS:
        count = len(_BRACKETS.findall(_TEXTS.sub("", text)))
    return count


def iterate_leaves(value: JSON, prefix: str = "") -> Iterator[tuple[str, JSON]]:
    """Every value below a mapping that is no mapping itself, by its dotted keys below ``prefix``.

    An empty mapping in the mapping is a leaf; below an empty one without a prefix there is none.
    """
    if isinstance(value, Mapping) and (value or not prefix):
        for key, item in value.items():
            yield from iterate_leaves(item, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value


def compute_json_digest(value: JSON) -> str:
    """SHA-256 (hex) of a JSON value's canonical text; raises as ``canonical_json``."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def seal(document: Mapping[str, JSON]) -> dict[str, JSON]:
    """The document with its ``digest``; raises as ``canonical_json``."""
    return {**document, "digest": compute_json_digest(document)}


def open_sealed(text: str | bytes) -> dict[str, Any]:
    """Returns the sealed document, without its ``digest``, from its JSON in any layout.

    Raises ``ValueError`` that goes on from the document's name: ``is not JSON: …``, ``is of type list, expected an
    object``, ``does not match its digest``.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"is of type {type(document).__name__}, expected an object")
    # Over the parsed content: the layout of the text may differ, its values may not.
    recorded = document.pop("digest", None)
    try:
        is_intact = recorded == compute_json_digest(document)
    except (ValueError, RecursionError):  # NaN, which Python's JSON reads but a sealed document never holds
        is_intact = False
    if not is_intact:
        raise ValueError("does not match its digest")
    return document
