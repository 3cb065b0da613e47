"""Thresholds of rollout correction as people write them: numbers, ``"lo_hi"`` and lists of these.

Contract: pure functions; ``ValueError`` says what is wrong and what to write. An unquoted ``0.5_5`` is the number 0.55
to YAML, and ``5_10`` is 510: what can only be such a number is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: A whole number from here on is taken for a mistaken ``lo_hi``: no ratio's bound is that large.
SUSPICIOUS_WHOLE_NUMBER = 100
UNLIMITED = "inf"

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


def parse_ratio_band(value: Threshold, *, key: str, lower: float | None = None) -> Band:
    """Bounds of a ratio: ``u`` is [lower or 1/u, u], and ``"lo_hi"`` is [lo, hi].

    Raises ``ValueError`` for what is no finite number above 0, an upper bound below 1, a lower bound above it, or two
    lower bounds.
    """
    if isinstance(value, str) and "_" in value:
        parts = value.split("_")
        if len(parts) != 2:
            raise ValueError(f"{key}: {value!r} has {len(parts)} parts; write two bounds, as in '0.5_2.0'")
        if lower is not None:
            raise ValueError(f"{key}: {value!r} has a lower bound, and {key}_lower is {lower}; give one of them")
        low, high = (_positive(part, key=key) for part in parts)
        if low > high:
            raise ValueError(f"{key}: {value!r} has its lower bound above the upper one: nothing would be within")
        return Band(lower=low, upper=high, is_pair=True)
    upper = _positive(value, key=key)
    if upper < 1.0:
        pair = _mistaken_pair(upper)
        raise ValueError(
            f"{key} is {upper:g}, below 1: a policy that has not moved, whose ratio is 1, would be beyond it. An "
            f"unquoted {pair} is this number to YAML: quote a pair of bounds, as in '{pair}'; `rules` take any bound"
        )
    if lower is not None and lower > upper:
        raise ValueError(f"{key}_lower {lower:g} is above {key} {upper:g}: nothing would be within")
    return Band(lower=lower if lower is not None else 1.0 / upper, upper=upper, is_pair=lower is not None)


def parse_divergence(value: Threshold, *, key: str, option: str) -> float:
    """The largest k2 or k3 that is kept, above 0; raises ``ValueError`` for pairs and for what is no such number."""
    if isinstance(value, str) and "_" in value:
        raise ValueError(f"{key}: {option} is never negative and has an upper bound alone; {value!r} has two")
    return _positive(value, key=key)


def split_thresholds(value: Threshold, *, key: str, options: list[str]) -> list[Threshold]:
    """One threshold for each option: as many as options, or one for all; raises ``ValueError`` for other numbers."""
    if not isinstance(value, str):
        return [value] * len(options)
    parts: list[Threshold] = [part.strip() for part in value.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"{key} is empty; give one threshold, or one for each of {', '.join(options)}")
    if len(parts) not in (1, len(options)):
        raise ValueError(
            f"{key} {value!r} has {len(parts)} thresholds for {len(options)} options ({', '.join(options)}); give one "
            "for all, or one for each"
        )
    return parts * len(options) if len(parts) == 1 else parts


def _positive(value: Threshold, *, key: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{key}: {value!r} is no number; write one, or a pair of bounds such as '0.5_2.0'") from None
    if not math.isfinite(number) or number <= 0.0:
        raise ValueError(f"{key}: {value!r} is no finite number above 0")
    return number


def _mistaken_pair(value: float) -> str:
    """The pair that YAML may have read as this number: 0.55 is 0.5_5."""
    text = f"{value:g}"
    return f"{text[:-1]}_{text[-1]}" if len(text) > 3 else f"{text}_5"
