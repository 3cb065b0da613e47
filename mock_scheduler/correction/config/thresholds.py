"""Reads thresholds of rollout correction as people write them: numbers, pairs ``"lo_hi"``, and lists of both.

Contract: pure functions; ``KeyedError`` names the key, the fault, and a spelling to write instead. An unquoted
``0.5_5`` is the number 0.55 to YAML, and ``5_10`` is 510. ``number_traps`` finds them in the files of a configuration;
here a number is refused wherever it comes from, if it can only be such a pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, Field

from mock_scheduler.config.problems import KeyedError

#: A whole number from here on is taken for a mistaken ``lo_hi``: no ratio's bound is that large.
SUSPICIOUS_WHOLE_NUMBER = 100
UNLIMITED = "inf"
_UNMOVED = "a policy that has not moved, whose ratio is 1, would be"
_ANY_BOUND = "use `rules`, which take any bound"

Threshold = float | str


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Bounds of a ratio or of an estimate; ``is_pair``: both were written, as in ``"0.5_2.0"``."""

    lower: float | None
    upper: float
    is_pair: bool


def read_scalar(value: object) -> object:
    """A threshold as a configuration holds it, number or text; raises ``ValueError`` for every other type."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"is {value!r}, of type {type(value).__name__}; expected a number, or a text such as '0.5_2.0'"
        )
    if isinstance(value, int) and value >= SUSPICIOUS_WHOLE_NUMBER:
        text = str(value)
        raise ValueError(
            f"is {value}: YAML reads an unquoted {text[0]}_{text[1:]} as that number; quote a pair of bounds, as in "
            f"'{text[0]}.0_{text[1:]}.0', or write {value}.0 for the number"
        )
    if math.isnan(value):
        raise ValueError("is not a number (NaN), which nothing is above or below")
    if math.isinf(value):
        return UNLIMITED if value > 0 else value
    return float(value)


def read_number(value: object) -> object:
    """Reads a single finite number; raises ``ValueError`` for other texts, bools, NaN and infinities.

    Python and pydantic read ``"0.5_5"`` as 0.55 and ``true`` as 1; neither is meant as a number.
    """
    if value is None:
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        if isinstance(value, str) and "_" in value:
            raise ValueError
        number = float(value)
    except ValueError:
        raise ValueError(f"is {value!r}, of type {type(value).__name__}; expected one number") from None
    if not math.isfinite(number):
        raise ValueError(f"is {value!r}; expected a finite number")
    return number


def read_positive(value: object) -> object:
    """Reads as ``read_number`` does, and above 0."""
    number = read_number(value)
    if isinstance(number, float) and number <= 0.0:
        raise ValueError(f"is {value!r}; expected a number above 0")
    return number


Number = Annotated[float, BeforeValidator(read_number)]
NonNegativeNumber = Annotated[float, Field(ge=0.0), BeforeValidator(read_number)]
PositiveNumber = Annotated[float, BeforeValidator(read_positive)]


def parse_ratio_band(value: Threshold, *, key: str, lower: float | None = None) -> Band:
    """Reads the bounds of a ratio: ``u`` is [lower or 1/u, u], and ``"lo_hi"`` is [lo, hi].

    Raises ``KeyedError`` for a bound that is no finite number above 0, for two lower bounds, and for bounds without 1,
    the ratio of an unmoved policy.
    """
    if isinstance(value, str) and "_" in value:
        parts = value.split("_")
        if len(parts) != 2:
            raise KeyedError(key, f"{value!r} has {len(parts)} parts; write two bounds, as in '0.5_2.0'")
        if lower is not None:
            raise KeyedError(key, f"{value!r} has a lower bound, and {key}_lower is {lower:g}; give one of them")
        low, high = (_positive(part, key=key) for part in parts)
        if low > high:
            raise KeyedError(key, f"{value!r} has its lower bound above the upper one: nothing would be within")
        if not low <= 1.0 <= high:
            raise KeyedError(key, f"{value!r} leaves out 1: {_UNMOVED} outside; {_ANY_BOUND}")
        return Band(lower=low, upper=high, is_pair=True)
    upper = _positive(value, key=key)
    if upper < 1.0:
        raise KeyedError(
            key,
            f"is {upper:g}, below 1: {_UNMOVED} beyond it{_mistaken_pair(upper)}; write both bounds, as in "
            f"'{upper:g}_1.5', or {_ANY_BOUND}",
        )
    if lower is not None and lower > 1.0:
        raise KeyedError(f"{key}_lower", f"is {lower:g}, above 1: {_UNMOVED} below it; {_ANY_BOUND}")
    return Band(lower=lower if lower is not None else 1.0 / upper, upper=upper, is_pair=lower is not None)


def parse_divergence(value: Threshold, *, key: str, option: str) -> float:
    """Reads the largest kept k2 or k3, a number above 0; raises ``KeyedError`` for pairs and other values."""
    if isinstance(value, str) and "_" in value:
        raise KeyedError(key, f"{option} is never negative and has an upper bound alone; {value!r} has two")
    return _positive(value, key=key)


def check_veto(threshold: float, *, key: str) -> None:
    """Raises ``KeyedError`` for a veto from 1 on."""
    if threshold >= 1.0:
        raise KeyedError(
            key,
            f"is {threshold:g}, and a veto is below 1: a policy that has hardly moved would lose its sequences; write "
            f"one such as 1e-4, or {_ANY_BOUND}",
        )


def split_thresholds(value: Threshold, *, key: str, options: list[str]) -> list[Threshold]:
    """Splits a text into a threshold for each option, or repeats the only one; ``KeyedError`` for other counts."""
    if not isinstance(value, str):
        return [value] * len(options)
    parts: list[Threshold] = [part.strip() for part in value.split(",") if part.strip()]
    if not parts:
        raise KeyedError(key, f"is empty; give one threshold, or one for each of {', '.join(options)}")
    if len(parts) not in (1, len(options)):
        raise KeyedError(
            key,
            f"{value!r} has {len(parts)} thresholds, and rollout_rs {len(options)} options ({', '.join(options)}); "
            "give one for all, or one for each",
        )
    return parts * len(options) if len(parts) == 1 else parts


def _positive(value: Threshold, *, key: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise KeyedError(key, f"{value!r} is no number; write one, or a pair of bounds such as '0.5_2.0'") from None
    if not math.isfinite(number) or number <= 0.0:
        raise KeyedError(key, f"{value!r} is no finite number above 0")
    return number


def _mistaken_pair(value: float) -> str:
    """Hints at the pair behind a number of YAML's, as 0.5_5 behind 0.55; empty where there is none."""
    text = f"{value:g}"
    is_possible = len(text) > 3 and "e" not in text
    return f" (an unquoted {text[:-1]}_{text[-1]} is this number to YAML)" if is_possible else ""
