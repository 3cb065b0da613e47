"""Plain data as values of strict JSON, and a command's result as ``--json`` asks for it.

Contract: NaN and infinities are texts, since JSON has neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from mock_scheduler.support.digests import JSON
from mock_scheduler.support.files import encode_json, save_json
from mock_scheduler.support.terminal_streams import print_output

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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
