"""Says a configuration's problems key by key, with the remedy of each.

Contract: all problems of one stage are in one ``ConfigError``, or the first of very many; unknown keys come with the
nearest known one. A validator of a whole section raises its problems with ``raise_keyed``, so each is shown at its own
key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import NoneType
from typing import NoReturn, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from mock_scheduler.config.base import is_union_tag
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.text import count_of, printable

Problem = tuple[str, str]
"""A dotted key, or ``""``, and what is wrong with it."""

_KeyPath = tuple[str | int, ...]

#: So many problems are listed; nobody's own configuration has more.
MAX_LISTED = 200


class KeyedError(ValueError):
    """A problem of one key of a section; ``key``: the dotted key within it, or ``""`` for the section."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(key, text)
        self.key = key
        self.text = text

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


@contextmanager
def collecting(problems: list[Problem]) -> Iterator[None]:
    """Adds a ``KeyedError`` of the block to ``problems``, and goes on after the block."""
    try:
        yield
    except KeyedError as error:
        problems.append((error.key, error.text))


def raise_keyed(title: str, problems: Sequence[Problem], values: Mapping[str, object]) -> NoReturn:
    """Raises pydantic's ``ValidationError`` with one entry per problem; for validators of a section.

    title: the model's name. values: the section's, for pydantic's own messages.
    """
    details: list[InitErrorDetails] = []
    for key, text in problems:
        path = tuple(int(part) if part.isdecimal() else part for part in key.split(".")) if key else ()
        error = PydanticCustomError("value_error", "{text}", {"text": text})
        details.append({"type": error, "loc": path, "input": values.get(key.split(".")[0])})
    raise ValidationError.from_exception_data(title, details)


def raise_problems(
    origin: str, problems: Sequence[Problem], *, source_of: Callable[[str], str | None] = lambda key: None
) -> NoReturn:
    """Raises the ``ConfigError`` with all of them, or the first of very many.

    ``source_of``: from a key to the override that set it, if any.
    """
    lines = [f"{origin} has {count_of(len(problems), 'problem')}:"]
    for key, text in problems[:MAX_LISTED]:
        given = source_of(key) if key else None
        source = f" (given as {given!r})" if given else ""
        # A key is a text of the file too: a line break in it begins no line.
        lines.append(f"  - {f'{printable(key)}: ' if key else ''}{text}{source}".replace("\n", "\n  "))
    if len(problems) > MAX_LISTED:
        lines.append(f"  - and {len(problems) - MAX_LISTED:,} more")
    raise ConfigError("\n".join(lines))


def validation_problems(error: ValidationError, model: type[BaseModel], *, section: str = "") -> list[Problem]:
    """Returns every problem found by pydantic; ``section``: the dotted key at which ``model`` stands.

    Those beyond the listed ones are named alone, since it takes its time to look for the nearest key.
    """
    found = error.errors(include_url=False)
    described = [_describe(details, model, section) for details in found[:MAX_LISTED]]
    return described + [(_dotted(section, details["loc"]), details["msg"]) for details in found[MAX_LISTED:]]


def _describe(details: ErrorDetails, model: type[BaseModel], section: str) -> Problem:
    path: _KeyPath = details["loc"]
    key, found = _dotted(section, path), details["input"]
    match details["type"]:
        case "extra_forbidden":
            return key, _describe_unknown_key(path, model, section)
        case "literal_error":
            known = ", ".join(str(value) for value in get_args(_annotation_at(path, model)))
            kind = "mode" if path[-1] == "mode" else "value"
            return key, f"unknown {kind} {found!r}; known {kind}s: {known}"
        case "missing":
            return key, "is required and not given"
        case "model_type" | "model_attributes_type":
            return key, f"is {found!r}, should be a section: keys with their values"
        case "value_error":
            return key, details["msg"].removeprefix("Value error, ")
        case _ if path and path[0] == "system_envs":
            return key, f"is {found!r}, should be a string; quote the variable's text, for example '1'"
        case _:
            return key, f"is {found!r}, {details['msg'].removeprefix('Input ')}"


def _dotted(section: str, path: _KeyPath) -> str:
    return ".".join(str(part) for part in (*filter(None, (section,)), *path) if not is_union_tag(part))


def _describe_unknown_key(path: _KeyPath, model: type[BaseModel], section: str) -> str:
    parent = _dotted(section, path[:-1])
    nearest = _nearest_key(path, model, section)
    hint = f"; nearest known key: {nearest}" if nearest else ""
    known = ", ".join(sorted(_section_fields(path[:-1], model)))
    return f"unknown key{hint}; known keys of {printable(parent) or 'the top level'}: {known}"


def _nearest_key(path: _KeyPath, model: type[BaseModel], section: str) -> str | None:
    """Finds the whole key that a user may mean: of this name in a section below or at the top, else a close one."""
    name, known = str(path[-1]), sorted(_section_fields(path[:-1], model))
    prefix = tuple(filter(None, (section, _dotted("", path[:-1]))))
    below = {field: (*prefix, outer, field) for outer in known for field in _section_fields((*path[:-1], outer), model)}
    if name in below:
        return ".".join(below[name])
    if len(path) > 1 and not section and name in model.model_fields:
        return name
    misspelt_below = get_close_matches(name, below, n=1, cutoff=0.9)
    if misspelt_below:
        return ".".join(below[misspelt_below[0]])
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return ".".join((*prefix, close[0])) if close else None


def _section_fields(path: _KeyPath, model: type[BaseModel]) -> list[str]:
    section = _annotation_at(path, model)
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []


def _annotation_at(path: _KeyPath, model: type[BaseModel]) -> object:
    """Returns the schema's type of the value at a path; fields by name, dict and list items by any key."""
    annotation: object = model
    for part in path:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            annotation = annotation.model_fields[str(part)].annotation
        elif is_union_tag(part):
            annotation = _member_of_union(annotation, str(part))
        else:
            annotation = get_args(annotation)[-1]
        annotation = _without_none(annotation)
    return annotation


def _member_of_union(annotation: object, tag: str) -> object:
    """Returns the section of a union with the tag."""
    tagged = {item.tag: get_args(member)[0] for member in get_args(annotation) for item in get_args(member)[1:]}
    return tagged[tag]


def _without_none(annotation: object) -> object:
    """``X`` of ``X | None``; dicts, lists and literals as they are."""
    if get_origin(annotation) in (dict, list) or NoneType not in get_args(annotation):
        return annotation
    return next(item for item in get_args(annotation) if item is not NoneType)
