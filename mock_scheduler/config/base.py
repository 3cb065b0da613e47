"""What all configuration models share: the base of sections and the types of their fields; imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

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
"""A set of steps that is not empty, as ``StepRanges.parse`` reads it."""


class ConfigSection(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable once loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), arbitrary_types_allowed=True)


def union_tag(name: str) -> str:
    """Returns the tag of one section of several that a key may hold; pydantic puts it into an error's path."""
    return f"<{name}>"


def is_union_tag(part: str | int) -> bool:
    """Says whether a part of an error's path is a tag, and no key that a user wrote."""
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")
