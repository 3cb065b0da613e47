"""Problems of single keys that a validator of a whole section finds, so that each is shown at its own dotted key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from mock_scheduler.config.problems import Problem


class KeyedError(ValueError):
    """What is wrong with one key of a section; ``key``: the dotted key within it, or ``""`` for the section."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(key, text)
        self.key = key
        self.text = text

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


@contextmanager
def collecting(problems: list[Problem]) -> Iterator[None]:
    """Add a ``KeyedError`` of the block to ``problems``, and go on after the block."""
    try:
        yield
    except KeyedError as error:
        problems.append((error.key, error.text))


def raise_keyed(title: str, problems: Sequence[Problem], values: Mapping[str, object]) -> NoReturn:
    """Raise pydantic's ``ValidationError`` with one entry per problem, to be called in a validator of the section.

    title: the model's name. values: the section's, for pydantic's own messages.
    """
    details: list[InitErrorDetails] = []
    for key, text in problems:
        path = tuple(int(part) if part.isdecimal() else part for part in key.split(".")) if key else ()
        error = PydanticCustomError("value_error", "{text}", {"text": text})
        details.append({"type": error, "loc": path, "input": values.get(key.split(".")[0])})
    raise ValidationError.from_exception_data(title, details)
