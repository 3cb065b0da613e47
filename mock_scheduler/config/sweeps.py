"""Overrides with a comma, which are sweeps over several runs to Hydra: what to write in their place.

Contract: text from an override; a list is advised only where the schema does not say that the key takes none.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from hydra.core.override_parser.types import Override, ValueType
from pydantic import BaseModel

from mock_scheduler.config.base import JoinedTexts
from pipelines.config.schema import PipelineConfig

_NUMBERS = (int, float, bool, NoneType)


def describe_sweep(text: str, override: Override) -> str:
    """Why the override ``text`` is refused, and what it may be meant as."""
    one_value = "is a sweep over several runs for Hydra, and this is one; give one value"
    key, _, value = text.partition("=")
    if override.value_type is not ValueType.SIMPLE_CHOICE_SWEEP or '"' in value or "'" in value:
        return one_value
    members = [*_members(_annotation(override.key_or_group))]
    if members and all(member in _NUMBERS or get_origin(member) is Literal for member in members):
        return one_value
    advice = f"""quote them, as in {shlex.quote(f'{key}="{value}"')}"""
    listed = shlex.quote(f"{key}=[{value}]")
    if JoinedTexts in members:
        advice += f", or write {listed}"
    elif not members or not all(member is str or member in _NUMBERS for member in members):
        advice += f", or where the key takes a list write {listed}"
    return f"values with a comma are a sweep over several runs for Hydra, and this is one; {advice}"


def _annotation(key: str) -> object:
    """What the schema says of a dotted key; ``None`` where it says nothing."""
    found: object = PipelineConfig
    for name in key.split("."):
        models = [item for item in _members(found) if isinstance(item, type) and issubclass(item, BaseModel)]
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        if not fields:
            return None
        found = fields[0].annotation
    return found


def _members(annotation: object) -> Iterator[object]:
    """The types of a union, without what pydantic is told of them; none for ``None``."""
    if annotation is None:
        return
    if annotation is not JoinedTexts and get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation
