"""All configuration models are made of this: the base of sections, types of fields, and the facts that fields state.

Contract: importing this imports no torch, and no key of any program is named here. The nearest statement about a key
counts: a field's own, else its section's (``ConfigSection.decides``), else that of the field around the section.
``Decides.VALIDATION`` of the field around a section is added to each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from fnmatch import fnmatchcase
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeGuard, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PrivateAttr

from mock_scheduler.config.steps import StepRanges

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Mode = Literal["train", "val"]
RolloutMode = Literal["real", "dump", "mock", "cache", "verify"]


def _join_texts(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    wrong = [item for item in value if not isinstance(item, str)]
    if wrong:
        raise ValueError(f"is a list with {wrong[0]!r}, of type {type(wrong[0]).__name__}; expected texts")
    return ",".join(value)


JoinedTexts = Annotated[str, BeforeValidator(_join_texts)]
"""A text with commas, or a list of texts, which becomes one."""


def _read_steps(value: object) -> StepRanges:
    steps = StepRanges.parse(value)
    if not steps.ranges:
        raise ValueError("names no step; leave the key out, or write steps and ranges such as '0-19, 40, 100-'")
    return steps


Steps = Annotated[StepRanges, BeforeValidator(_read_steps), PlainSerializer(str, return_type=str)]
"""A set of at least one step, as ``StepRanges.parse`` reads it."""


def _check_file_name(name: str) -> str:
    if not name or name != name.strip() or name in (".", "..") or not name.isprintable() or {*name} & {"/", "\\"}:
        raise ValueError(
            f"is {name!a}, which cannot name a folder: expected printable characters without / and \\, no space at "
            "either end, and neither . nor .."
        )
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"has {len(name.encode())} bytes, and the name of a folder has at most {_MAX_NAME_BYTES}")
    return name


# Of 255 that file systems allow; candidates and proofs append their own names.
_MAX_NAME_BYTES = 160

FileName = Annotated[str, AfterValidator(_check_file_name)]
"""A text that becomes one part of a path, and can lead nowhere else."""


class Decides(Flag):
    """States the consequences of a key's value; each field has its own, as ``Annotated[int, Decides.BITS]``.

    Every rule about keys is made of these facts where it is needed: the contract of a recording or of a training
    service, the settings of a checkpoint, the kind of a candidate's change, the fingerprint of a run.
    """

    NOTHING = 0
    """No bit of a training on given rollouts: tracing, recording, saving and showing."""
    ROLLOUTS = auto()
    """The played rollouts: their tokens, rewards, number and order."""
    TRAINING = auto()
    """The mathematics of training: policy, algorithm, optimizer and schedule, whatever computes them."""
    BITS = auto()
    """How the same mathematics is computed: precision, kernels, batches, faults; anything may round."""
    ORDER = auto()
    """The order of sums alone."""
    EXECUTION = auto()
    """How training is executed: twice, elsewhere or at another time. No bit of it moves."""
    STATE = auto()
    """The tensors, seeded parts and counters in a checkpoint: a resumed run needs the same value."""
    VALIDATION = auto()
    """Validation alone; stated beside the other facts. At a section it holds for every key inside."""
    OUTSIDE = auto()
    """Something outside the configuration, of any effect; it is compared as found there, and not by the key."""
    LABEL = auto()
    """Only a name or a place: neither a value nor a file's content follows from the text."""


KeyPath: TypeAlias = "tuple[str | int, ...]"
"""The keys and indices that lead to a value."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EnvironmentTexts:
    """Holds the texts of a configuration that came out of the environment.

    ``texts``: by place, the value and the text to store in its stead, which holds ``${oc.env:NAME}``. A value that was
    replaced since is no longer the environment's.
    """

    texts: Mapping[KeyPath, tuple[str, str]] = field(default_factory=dict)

    # Two configurations with equal values are equal, wherever the values came from.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, EnvironmentTexts)

    def __hash__(self) -> int:
        return 0

    def stored(self, path: KeyPath, value: object) -> str | None:
        """Returns the text to store for the value at a place; ``None`` where it is stored as it is."""
        known = self.texts.get(path)
        return known[1] if known is not None and known[0] == value else None


class ConfigSection(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable once loaded.

    ``decides``: the facts about each field without any of its own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), arbitrary_types_allowed=True)
    decides: ClassVar[Decides | None] = None
    _environment_texts: EnvironmentTexts = PrivateAttr(default=EnvironmentTexts())

    @property
    def environment_texts(self) -> EnvironmentTexts:
        """The texts that are stored unresolved."""
        return self._environment_texts

    def keep_environment_texts(self, found: EnvironmentTexts) -> None:
        """Note the texts to store unresolved; no value changes."""
        self._environment_texts = found


def union_tag(name: str) -> str:
    """Returns the tag of one of several sections that a key may hold; pydantic puts it into an error's path."""
    return f"<{name}>"


def is_union_tag(part: str | int) -> bool:
    """Says whether a part of an error's path is a tag, and no key of the user's."""
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")


_ANY = "*"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyEffects:
    """Holds the facts about each key of a schema.

    ``by_key``: by dotted keys, in the order of the schema; ``*`` stands for a key of the user's choice, as in
    ``custom_envs.*.max_steps``, and for the index of a list.
    """

    by_key: Mapping[str, Decides]

    def of(self, key: str) -> Decides:
        """Returns the facts about one dotted key; raises ``KeyError`` for a key outside the schema."""
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
        TypeError: names every key without a statement, and every key of a union whose sections state two.
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
    """Yields every key below a section with its facts; ``held``: the facts about the field around the section."""
    for name, info in schema.model_fields.items():
        own = next((item for item in info.metadata if isinstance(item, Decides)), schema.decides)
        facts = held if own is None else own
        if facts is not None and held is not None:
            facts |= held & Decides.VALIDATION
        yield from _walk_value(info.annotation, facts, f"{prefix}{name}")


def _walk_value(annotation: Any, facts: Decides | None, key: str) -> Iterator[tuple[str, Decides | None]]:  # noqa: ANN401 - a type's expression
    """Yields the keys made by a value of this type: its own unless it is always a section, and all keys inside."""
    kinds = list(list_alternatives(annotation))
    sections = [kind for kind in kinds if is_section(kind)]
    if len(sections) < len(kinds):
        yield key, facts
    for section in sections:
        yield from _walk(section, facts, f"{key}.")
    for kind in kinds:
        if get_origin(kind) in (dict, list):
            yield from _walk_value(get_args(kind)[-1], facts, f"{key}.{_ANY}")


def list_alternatives(annotation: Any) -> Iterator[Any]:  # noqa: ANN401 - a type's expression
    """Yields the types of a union, or the one type, bare of ``Annotated``."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from list_alternatives(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for kind in get_args(annotation):
            yield from list_alternatives(kind)
    else:
        yield annotation


def is_section(kind: Any) -> TypeGuard[type[ConfigSection]]:  # noqa: ANN401 - a type's expression
    """Says whether a type is a section of a configuration."""
    return isinstance(kind, type) and issubclass(kind, ConfigSection)
