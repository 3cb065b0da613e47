"""Random numbers have names: nothing draws from a global generator, and no seed comes from ``hash()``.

A stream's name says its purpose, so its numbers depend neither on the order of calls, nor on the number of processes,
nor on ``PYTHONHASHSEED``.
"""

from __future__ import annotations

import hashlib


def _digest(seed: int, names: tuple[str | int, ...]) -> bytes:
    return hashlib.sha256("/".join(str(part) for part in (seed, *names)).encode()).digest()


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed in [0, 2**31) for the stream of that name; gymnasium and NumPy take it."""
    return int.from_bytes(_digest(seed, names)[:4], "little") >> 1


def derive_uniform(seed: int, *names: str | int) -> float:
    """One number in [0, 1) with 53 random bits, fixed by its name."""
    return (int.from_bytes(_digest(seed, names)[:8], "little") >> 11) * 2.0**-53
