"""Stored documents: the one codec between typed values and the JSON of a file; and results as ``--json`` asks for them.

A data class is the description of its document: its fields are the keys, its annotations the checks. ``AsRow`` stores
one as a short list instead, in files holding it thousands of times. A field of type ``JSON`` holds any JSON value.

Contract: ``load`` is the inverse of ``dump``. Reading is strict: ``"3"``, ``true`` and ``3.0`` are no whole numbers.
Keys a class does not have are passed over, so a file of a later release opens; a missing key without a
default, or a value of another type, is an error naming the field, the value found and the value expected. The
caller adds the name of the file.

JSON is strict: NaN and infinities are texts, since it has neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, get_type_hints

from pydantic import Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from mock_scheduler.support.digests import JSON, canonical_json
from mock_scheduler.support.files import encode_json, save_json
from mock_scheduler.support.terminal_streams import print_output
from mock_scheduler.support.text import list_some, shorten

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

_MAX_PROBLEMS = 5
_MAX_SHOWN = 60

#: In pydantic's messages -> in ours.
_WORDS = {
    "Value error, ": "",
    "Input should be": "expected",
    "a valid integer": "a whole number",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid string": "a text",
    "a valid tuple": "a list",
    "a valid array": "a list",
}

#: A whole number from 0 on that 64 bits hold.
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]


class AsRow:
    """Stores a data class as the list of its fields' values, in their order: ``Annotated[Block, AsRow()]``."""

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        names = [field.name for field in fields(source)]
        hints = get_type_hints(source, include_extras=True)
        return core_schema.no_info_after_validator_function(
            lambda values: source(**dict(zip(names, values, strict=True))),
            core_schema.tuple_schema([handler.generate_schema(hints[name]) for name in names]),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value: [getattr(value, name) for name in names]  # its own fields: nothing is guessed
            ),
        )


class Document(Generic[T]):
    """Reads and writes the stored form of one type; made once, beside the type."""

    def __init__(self, kind: Any) -> None:  # noqa: ANN401 - a type, or an annotated one, which mypy takes for no type
        self._adapter: TypeAdapter[T] = TypeAdapter(kind)
        self._names = [field.name for field in fields(kind)] if is_dataclass(kind) else None

    def dump(self, value: T) -> Any:  # noqa: ANN401 - JSON: an object for a data class
        """Gives the value as plain JSON values: fields in the order of the class, tuples as lists, enums as texts."""
        return self._adapter.dump_python(value, mode="json")

    def load(self, content: Any, *, at: str = "") -> T:  # noqa: ANN401 - JSON that was parsed
        """Gives the stored value. A data class takes its own keys out of an object that may hold more.

        Args:
            content: parsed JSON.
            at: the key of the content in its file, for messages.

        Raises:
            ValueError: the content is another; the message lists problems like ``rows.lengths[2] is -1: expected at
                least 0``.
        """
        if self._names is not None and isinstance(content, dict):
            content = {name: content[name] for name in self._names if name in content}
        # As text, since only there does strictness take a list for a tuple and a text for an enum.
        try:
            return self._adapter.validate_json(canonical_json(content), strict=True)
        except RecursionError as error:
            raise ValueError("has too many levels of lists and objects in each other") from error
        except ValidationError as error:
            raise ValueError(_describe(error, at)) from error


def _describe(error: ValidationError, at: str) -> str:
    problems = []
    for item in error.errors(include_url=False, include_context=False):
        steps = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]]
        place = "".join([at, *steps]).lstrip(".")
        if item["type"] == "missing":
            problems.append(f"{place} is missing")
            continue
        expected = item["msg"]
        for theirs, ours in _WORDS.items():
            expected = expected.replace(theirs, ours, 1)
        problems.append(f"{place or 'it'} is {shorten(repr(item['input']), _MAX_SHOWN)}: {expected}")
    return list_some(problems, _MAX_PROBLEMS)


def dataclass_to_json(value: DataclassInstance) -> dict[str, JSON]:
    """Makes a JSON object of a dataclass: its fields, in order, as ``to_json`` gives them."""
    return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}


def to_json(value: object) -> JSON:
    """Makes JSON values of plain data (dataclasses, mappings, sequences, paths, numbers, text).

    NaN and infinities are ``"nan"``, ``"inf"`` and ``"-inf"``; an enum's member is its value.
    """
    if isinstance(value, Enum):
        return to_json(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return dataclass_to_json(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, frozenset):
        return [to_json(item) for item in sorted(value)]
    raise TypeError(f"{type(value).__name__} has no JSON form")


#: ``--json -``: the JSON goes to stdout, in place of the text.
STDOUT = "-"


def write_json(value: Mapping[str, JSON], path: str | None) -> None:
    """Write a result as ``--json`` asks: to a file, to stdout, or (``None``) not at all."""
    if path == STDOUT:
        # JSON may hold DEL as it is; escaped by JSON's own rule it is the same text.
        print_output(encode_json(value, sort_keys=False).decode().rstrip("\n").replace("\x7f", "\\u007f"))
    elif path is not None:
        save_json(Path(path), value, sort_keys=False)
