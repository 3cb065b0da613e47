"""Numbers of JSON and YAML, which may be larger than any float.

Contract: standard library only.
"""

from __future__ import annotations

import sys
from typing import TypeGuard

#: A number in a name has at most so many digits; a longer one is text.
MAX_DIGITS = 18


def natural_part(text: str) -> tuple[int, str]:
    """Gives a part of a name its place in natural order: ``layer.2`` comes before ``layer.10``."""
    return (int(text), "") if text.isdecimal() and len(text) <= MAX_DIGITS else (-1, text)


def is_real(value: object) -> TypeGuard[int | float]:
    """Says whether a value is a number that a float can hold: ``float(value)`` succeeds. A bool is none."""
    if isinstance(value, bool):
        return False
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
