"""Reads the values in a command's configuration, and texts with fields in braces, as ``--tp={tp}``; imports no torch.

Contract: pure; a field is a name and nothing else, so no text of a configuration is ever evaluated. ``{{`` and ``}}``
are braces themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, StrictBool, StrictFloat, StrictInt, StrictStr

from mock_scheduler.determinism.settings import environment_settings

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


def list_fields(texts: Iterable[str]) -> list[str]:
    """Lists the names of all fields in order, each once."""
    found = (match[1] for text in texts for match in _PART.finditer(text) if match[1] is not None)
    return list(dict.fromkeys(found))


def render(text: str, values: Mapping[str, str]) -> str:
    """Puts the values in; raises ``KeyError`` for a field without one."""
    return _PART.sub(lambda match: match[0][0] if match[1] is None else values[match[1]], text)


Scalar: TypeAlias = StrictBool | StrictInt | StrictFloat | StrictStr | None
#: In ``arguments``, by values: every value without an entry of its own.
ANY_VALUE = "*"
#: The sections of keys that arguments have.
OPTIONS, PARALLEL = "options", "parallel"

# At these values a key's arguments are left out: a degree of 1 is what every training has without being told.
_NEUTRAL = {PARALLEL: ("1", "null", "false"), OPTIONS: ("null", "false"), "precision": ("float32",)}

# Kernels of several streams reach a GPU in the order in which they were launched, as Megatron asks for.
_ORDERED_LAUNCHES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def value_text(value: Scalar) -> str:
    """Writes a value as YAML does: ``true``, ``null``, ``2``."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def is_neutral(key: str, value: Scalar) -> bool:
    """Says whether a key at this value needs no argument."""
    return value_text(value) in _NEUTRAL.get(key.partition(".")[0], ())


def read_arguments(value: object) -> object:
    """Brings every key to one form: from a value's text, or ``*``, to its arguments."""
    if not isinstance(value, Mapping):
        return value
    flat: dict[str, object] = {}
    for name, item in value.items():
        is_section = str(name) in (OPTIONS, PARALLEL) and isinstance(item, Mapping)
        flat |= {f"{name}.{own}": part for own, part in item.items()} if is_section else {str(name): item}
    return {key: _by_value(key, item) for key, item in flat.items()}


def _by_value(key: str, item: object) -> object:
    if isinstance(item, Mapping):
        return {value_text(value): words for value, words in item.items()}
    # A list is for every value at which the key says something.
    left_out = () if key == "precision" else _NEUTRAL.get(key.partition(".")[0], ())
    return {**{text: [] for text in left_out}, ANY_VALUE: item} if isinstance(item, list) else item


def add_deterministic_settings(value: object) -> object:
    """Lays the given variables over those of a deterministic run."""
    required = {setting.name: setting.recommended for setting in environment_settings() if setting.required}
    return {**required, **_ORDERED_LAUNCHES, **value} if isinstance(value, Mapping) else value


def write_as_texts(value: object) -> object:
    """Numbers and switches as the texts that an environment, or a command line, has."""
    if isinstance(value, Mapping):
        return {str(name): write_as_texts(item) for name, item in value.items()}
    if isinstance(value, list):
        return [write_as_texts(item) for item in value]
    return value_text(value) if isinstance(value, bool | int | float) else value


Words = Annotated[list[str], BeforeValidator(write_as_texts)]
Environment = Annotated[dict[str, str], BeforeValidator(write_as_texts)]
Settings = Annotated[dict[str, str], BeforeValidator(add_deterministic_settings)]
#: By key, then by the text of a value or ``*``: the arguments.
ArgumentTable = Annotated[dict[str, dict[str, Words]], BeforeValidator(read_arguments)]
