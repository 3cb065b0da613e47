"""Which number of the layout a ratio is: an axis, the number of micro-batches, a ratio of token counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations

#: How far a ratio may be from a number of the layout and still be it; of few elements, which prove less.
CLOSE, VERY_CLOSE = 5e-3, 1e-3


def name_factor(value: float, layout: Mapping[str, float], *, closeness: float = CLOSE) -> str | None:
    """The simplest numbers of the layout that ``value`` is: ``tp or 1/dp``; ``None`` where it is none.

    layout: numbers by name, as ``{"tp": 2, "micro-batches": 4}``. Tried in this order, the nearest first within each:
    the numbers and their inverses; their square roots; products and quotients of two.
    """
    known = {name: float(number) for name, number in layout.items() if number > 0 and number != 1}
    roots = {f"√{name}": math.sqrt(number) for name, number in known.items()}
    for candidates in (_with_inverses(known), _with_inverses(roots), _products(known)):
        errors = {name: abs(value / number - 1.0) for name, number in candidates.items()}
        nearest = min(errors.values(), default=math.inf)
        if nearest <= closeness:
            return " or ".join(name for name, error in errors.items() if error <= nearest + 1e-9)
    return None


def _with_inverses(numbers: Mapping[str, float]) -> dict[str, float]:
    return {**numbers, **{f"1/{name}": 1.0 / number for name, number in numbers.items()}}


def _products(numbers: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for (left, mine), (right, other) in combinations(numbers.items(), 2):
        found[f"{left} × {right}"] = mine * other
        found[f"1/({left} × {right})"] = 1.0 / (mine * other)
        found[f"{left}/{right}"] = mine / other
        found[f"{right}/{left}"] = other / mine
    return {name: number for name, number in found.items() if number != 1.0}
