"""Random numbers have names; the episodes of training and validation have seeds, and layouts of their own.

Nothing draws from a global generator, and no seed comes from ``hash()``. A stream's name says its purpose, so its
numbers depend neither on the order of calls, nor on the number of processes, nor on ``PYTHONHASHSEED``.

Contract: whether a layout is held out for validation depends on its rows and on the fraction alone, never on a seed. So
two seeds with the same layout cannot carry it from one set into the other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from mock_scheduler.config.base import Mode
from mock_scheduler.errors import ConfigError
from pipelines.config.environments import CustomEnvConfig
from pipelines.environments.base import Split


def _digest(seed: int, names: tuple[str | int, ...]) -> bytes:
    return hashlib.sha256("/".join(str(part) for part in (seed, *names)).encode()).digest()


def derive_seed(seed: int, *names: str | int) -> int:
    """Returns a seed in [0, 2**31) for the stream of that name; gymnasium and NumPy take it."""
    return int.from_bytes(_digest(seed, names)[:4], "little") >> 1


def derive_uniform(seed: int, *names: str | int) -> float:
    """Returns one number in [0, 1) with 53 random bits, fixed by its name."""
    return (int.from_bytes(_digest(seed, names)[:8], "little") >> 11) * 2.0**-53


# Draws until the chance of missing a set with its share of the layouts is exp(-30).
_DRAWS_PER_CHANCE = 30


def is_held_out(rows: Sequence[str], fraction: float) -> bool:
    """Says whether the SHA-256 of the rows, joined by line breaks, is in the lowest ``fraction`` of all digests."""
    digest = hashlib.sha256("\n".join(rows).encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


def is_in_split(rows: Sequence[str], split: Split, fraction: float) -> bool:
    """Says whether a layout may be played in ``split``."""
    return split == "all" or fraction == 0.0 or is_held_out(rows, fraction) == (split == "held_out")


def max_draws(split: Split, fraction: float) -> int:
    """Returns the number of draws after which the split is taken to be empty."""
    if split == "all" or fraction == 0.0:
        return 1
    share = fraction if split == "held_out" else 1.0 - fraction
    return math.ceil(_DRAWS_PER_CHANCE / share)


def check_split(split: Split, fraction: float) -> None:
    """Raises ``ConfigError`` where held-out layouts are asked for and none are held out."""
    if split == "held_out" and fraction == 0.0:
        raise ConfigError(
            "the held-out layouts were asked for, but held_out_fraction is 0.0: set it above 0 to hold some out"
        )


def environment_seed(seed: int, *, tag: str, mode: Mode, scheduler_id: str, group_id: int, episode_id: int) -> int:
    """Derives an episode's seed, in [0, 2**31), from the run's ``seed``; all members of a group have the same."""
    return derive_seed(seed, "environment", tag, mode, scheduler_id, group_id, episode_id)


def split_of(config: CustomEnvConfig, mode: Mode) -> Split:
    """Chooses the layouts of a mode: validation plays held-out ones alone where there are any."""
    if mode == "train":
        return "train"
    return "held_out" if config.env_config.held_out_fraction > 0 else "all"
