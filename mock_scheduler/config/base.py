"""What all configuration models share: the base of sections, the types of their fields, the facts that these state.

Contract: importing this imports no torch.
"""

from __future__ import annotations

from enum import Flag, auto
from typing import Annotated, ClassVar, Literal

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


class Decides(Flag):
    """Facts about a key: what follows from its value; each field states them, as ``Annotated[int, Decides.BITS]``.

    Every rule about keys is made of these facts, at the place that needs the rule: the contract of a recording, that of
    a training service, the settings of a checkpoint, the kind of a candidate's change, the fingerprint of a run.
    """

    NOTHING = 0
    """No bit of a training on given rollouts: what is traced, recorded, saved or shown."""
    ROLLOUTS = auto()
    """The rollouts that are played: their tokens, rewards, number and order."""
    TRAINING = auto()
    """The mathematics of training: policy, algorithm, optimizer and schedule, whatever computes them."""
    BITS = auto()
    """How the same mathematics is computed: precision, kernels, batches, faults; anything may round."""
    ORDER = auto()
    """The order of sums alone."""
    EXECUTION = auto()
    """How training is executed: what is computed twice, elsewhere or at another time. No bit of it moves."""
    STATE = auto()
    """The tensors, seeded parts and counters that a checkpoint hands on: a run that goes on needs the same value."""
    VALIDATION = auto()
    """Validation alone; stated beside the other facts. Of a section it holds for every key inside."""
    OUTSIDE = auto()
    """Something outside the configuration, of any effect; it is compared as it is found there, and not by the key."""
    LABEL = auto()
    """Only a name, or where something lies: neither a value nor a file's content follows from the text."""


class ConfigSection(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable once loaded.

    ``decides``: the facts about each field that states none itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), arbitrary_types_allowed=True)
    decides: ClassVar[Decides | None] = None


def union_tag(name: str) -> str:
    """Returns the tag of one section of several that a key may hold; pydantic puts it into an error's path."""
    return f"<{name}>"


def is_union_tag(part: str | int) -> bool:
    """Says whether a part of an error's path is a tag, and no key that a user wrote."""
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")
