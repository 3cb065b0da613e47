"""Reads YAML of users and of received folders: plain values of bounded size, or an error naming file and line.

A few lines of YAML can stand for a billion values: an alias repeats all that its anchor holds. So the text is walked
once before anything is built: values behind aliases count each time, and nesting, sizes, repeated keys and tags are
looked at.

Contract: never builds an object of a class, and takes no more time and memory than the limits here allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from mock_scheduler.support.text import on_one_line, shorten

#: The limits of one text: characters; values with aliases expanded, and the characters in them; levels of nesting.
MAX_TEXT = 4 << 20
MAX_VALUES = 50_000
MAX_CHARACTERS = 8 << 20
MAX_DEPTH = 64

_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq"))
_MERGE = "<<"
_MAX_SHOWN = 60


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]  # one of two bases
    """Makes plain values only; dates stay texts, as in OmegaConf. Names the line of a scalar that is no value."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        # Of PyYAML 6.0, for scalars such as ``!!bool x`` or an integer of 5,000 digits.
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            kind, text = str(node.tag).rpartition(":")[2], shorten(repr(node.value), _MAX_SHOWN)
            raise yaml.constructor.ConstructorError(None, None, f"{text} is no {kind}", node.start_mark) from error


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


@dataclass(frozen=True, slots=True)
class _Size:
    """How much a value stands for, aliases expanded."""

    values: int = 1
    characters: int = 0


@dataclass(kw_only=True, slots=True)
class _Open:
    """A list or a mapping whose end was not read yet. ``keys``: those of a mapping so far; ``None`` in a list."""

    anchor: str | None
    size: _Size = field(default_factory=_Size)
    keys: set[str] | None = None
    awaits_key: bool = False


def load_yaml(text: str) -> Any:  # noqa: ANN401 - any plain value
    """Reads one document.

    Raises:
        ValueError: goes on from the file's name: ``is not YAML: …``, ``line 7: …``.
    """
    check_yaml(text)
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(_describe(error)) from error


def check_yaml(text: str) -> None:
    """Raise ``ValueError``, as ``load_yaml`` does, where a text is no YAML or stands for more than the limits."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"has {len(text):,} characters, expected at most {MAX_TEXT:,}")
    walk = _Walk()
    try:
        for event in yaml.parse(text, Loader=_Loader):
            walk.take(event)
    except yaml.YAMLError as error:
        raise ValueError(_describe(error)) from error


class _Walk:
    """Counts the values of a document, event by event; no recursion, since nesting is what it looks for."""

    def __init__(self) -> None:
        self._anchors: dict[str, _Size] = {}
        self._open: list[_Open] = []

    def take(self, event: yaml.Event) -> None:
        """Take the next event; raises ``ValueError`` where the text says more than it may."""
        problem = next(self._problems(event), None)
        if problem is not None:
            line = "" if event.start_mark is None else f"line {event.start_mark.line + 1}: "
            raise ValueError(f"{line}{problem}")

    def _problems(self, event: yaml.Event) -> Iterator[str]:
        if isinstance(event, yaml.ScalarEvent):
            yield from self._check_tag(event)
            yield from self._check_key(event.value)
            yield from self._add(_Size(characters=len(event.value)), event.anchor)
        elif isinstance(event, yaml.AliasEvent):
            yield from self._check_key(None)
            yield from self._expand(str(event.anchor))
        elif isinstance(event, yaml.CollectionStartEvent):
            yield from self._check_tag(event)
            yield from self._check_key(None)
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            self._open.append(_Open(anchor=event.anchor, keys=set() if is_mapping else None, awaits_key=is_mapping))
            if len(self._open) > MAX_DEPTH:
                yield f"more than {MAX_DEPTH} levels of lists and mappings in each other"
        elif isinstance(event, yaml.CollectionEndEvent):
            closed = self._open.pop()
            yield from self._add(closed.size, closed.anchor)

    def _check_tag(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> Iterator[str]:
        if event.tag not in (None, "!") and event.tag not in _PLAIN_TAGS:
            yield f"the tag {event.tag!r}; expected plain values"

    def _check_key(self, key: str | None) -> Iterator[str]:
        """Looks at a value that may stand as a key; ``None``: it is no text."""
        above = self._open[-1] if self._open else None
        if above is None or above.keys is None:
            return
        if above.awaits_key and key is not None and key != _MERGE:
            if key in above.keys:
                yield f"the key {key[:100]!r} is there twice"
            above.keys.add(key)
        above.awaits_key = not above.awaits_key

    def _expand(self, anchor: str) -> Iterator[str]:
        if any(item.anchor == anchor for item in self._open):
            yield f"the alias *{anchor} stands within its own anchor"
        # An unknown anchor is an error of the parser's own, once the values are built.
        yield from self._add(self._anchors.get(anchor, _Size()), None)

    def _add(self, size: _Size, anchor: str | None) -> Iterator[str]:
        """Adds a complete value to the one around it."""
        if anchor is not None:
            self._anchors[anchor] = size
        if self._open:
            around = self._open[-1]
            size = around.size = _Size(around.size.values + size.values, around.size.characters + size.characters)
        if size.values > MAX_VALUES or size.characters > MAX_CHARACTERS:
            yield f"with its aliases this stands for more than {MAX_VALUES:,} values or {MAX_CHARACTERS:,} characters"


def _describe(error: yaml.YAMLError) -> str:
    """Names the line, and what is wrong there; the text itself is not repeated."""
    if isinstance(error, yaml.MarkedYAMLError):
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        return f"is not YAML: {line}{error.problem or error.context}"
    return f"is not YAML: {on_one_line(error)}"
