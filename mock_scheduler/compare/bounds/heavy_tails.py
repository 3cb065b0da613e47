"""How far a candidate may be beyond all noise that was seen, told by how far perturbed runs are beyond each other.

A token whose clip turned moves all gradients of its update, and a weight with a gradient near 0 is moved by Adam by a
whole step either way; few runs show little of that. So each perturbed run is held to the others: with F the largest
noise of a tensor over the second largest, the largest F of all tensors of a *pool* (kind and update) widens the bounds
of that pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Pool = tuple[str, int, int]
"""What heavy tails have in common: kind, or ``metric``; step; update, of metrics 0."""

#: How many times F a difference may be, and how many times the noise at most.
_ROOM, _LARGEST = 2.0, 9.0


def find_factors(
    samples: Iterable[tuple[Pool, Sequence[float]]], *, usual: float, smallest: float
) -> dict[Pool, float]:
    """By pool, how many times its noise a figure may differ, where that is more than ``usual``.

    samples: of each tensor or metric its pool, and its noise in every run. smallest: noise that is none.
    """
    factors: dict[Pool, float] = {}
    for pool, values in samples:
        ranked = sorted(values)
        if len(ranked) > 1 and ranked[-2] > smallest and math.isfinite(ranked[-1]):
            needed = min(_ROOM * ranked[-1] / ranked[-2], _LARGEST)
            if needed > factors.get(pool, usual):
                factors[pool] = needed
    return factors


def describe_factors(factors: dict[Pool, float]) -> str:
    """``of parameter up to 8.3 times, of loss up to 4.5 times``; empty where there are none."""
    largest: dict[str, float] = {}
    for (kind, *_), factor in factors.items():
        largest[kind] = max(factor, largest.get(kind, 0.0))
    return ", ".join(f"of {kind} up to {factor:.2g} times" for kind, factor in largest.items())
