"""What every key of a configuration decides, as the fields of its sections state it.

Contract: the nearest statement counts: a field's own, else that of the field's section (``ConfigSection.decides``),
else that of the field that holds the section. ``Decides.VALIDATION`` of a holding field is added to each. No key of any
program is named here; importing this imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from mock_scheduler.config.base import ConfigSection, Decides

_ANY = "*"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyEffects:
    """The facts about each key of a schema.

    ``by_key``: by dotted keys, in the order of the schema; ``*`` stands for a key that the user chooses, as in
    ``custom_envs.*.max_steps``, and for the index of a list.
    """

    by_key: Mapping[str, Decides]

    def of(self, key: str) -> Decides:
        """Returns the facts about one dotted key; raises ``KeyError`` for a key that the schema has not."""
        if key in self.by_key:
            return self.by_key[key]
        found = [facts for pattern, facts in self.by_key.items() if _ANY in pattern and fnmatchcase(key, pattern)]
        if not found:
            raise KeyError(f"{key} is no key of this configuration")
        return found[0]


@functools.cache
def effects_of(schema: type[ConfigSection]) -> KeyEffects:
    """Reads the statements of a schema, through sections, optional ones, and lists, mappings and unions of them.

    Raises:
        TypeError: names every key that has no statement, and every key of a union whose sections state two.
    """
    stated: dict[str, Decides] = {}
    problems: list[str] = []
    for key, facts in _walk(schema, None, ""):
        if facts is None:
            problems.append(f"{key} does not state what it decides: write Annotated[..., Decides.X] at its field")
        elif stated.setdefault(key, facts) != facts:
            problems.append(f"{key} states {stated[key]} in one section and {facts} in another; state one")
    if problems:
        raise TypeError(f"{schema.__name__}: {'; '.join(problems)}")
    return KeyEffects(by_key=stated)


def _walk(schema: type[ConfigSection], held: Decides | None, prefix: str) -> Iterator[tuple[str, Decides | None]]:
    """Yields every key below a section with its facts; ``held``: the facts about the field that holds the section."""
    for name, field in schema.model_fields.items():
        own = next((item for item in field.metadata if isinstance(item, Decides)), schema.decides)
        facts = held if own is None else own
        if facts is not None and held is not None:
            facts |= held & Decides.VALIDATION
        yield from _walk_value(field.annotation, facts, f"{prefix}{name}")


def _walk_value(annotation: Any, facts: Decides | None, key: str) -> Iterator[tuple[str, Decides | None]]:  # noqa: ANN401 - a type's expression
    """Yields the keys that a value of this type makes: its own unless it is always a section, and those inside."""
    kinds = list(_alternatives(annotation))
    sections = [kind for kind in kinds if _is_section(kind)]
    if len(sections) < len(kinds):
        yield key, facts
    for section in sections:
        yield from _walk(section, facts, f"{key}.")
    for kind in kinds:
        if get_origin(kind) in (dict, list):
            yield from _walk_value(get_args(kind)[-1], facts, f"{key}.{_ANY}")


def _alternatives(annotation: Any) -> Iterator[Any]:  # noqa: ANN401 - a type's expression
    """Yields the types of a union, or the one type, without what ``Annotated`` adds."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for kind in get_args(annotation):
            yield from _alternatives(kind)
    else:
        yield annotation


def _is_section(kind: Any) -> bool:  # noqa: ANN401 - a type's expression
    return isinstance(kind, type) and issubclass(kind, ConfigSection)
