"""What one compared tensor shows, as plain data: figures, tier, where the difference lies and what it looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mock_scheduler.trace.entries import DimName, RankPlace

Tier = Literal["identical", "ulp", "tolerance", "diverged"]
"""``identical``: equal bits. ``ulp``: no element is further than ``bounds.NUM_ULPS`` units in the last place.
``tolerance``: within its bound. ``diverged``: beyond it. Each is at least as strict as the next."""

ResidualKind = Literal[
    "ratio",
    "missing part",
    "doubled part",
    "sign",
    "permutation",
    "shift",
    "stale",
    "zeroed",
    "constant",
    "one element",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstElement:
    """The element with the largest |a - b|.

    index: in the canonical tensor. sample, position: of token tensors, the row's identity and the token's position in
    it. baseline_ranks, candidate_ranks: which ranks held it.
    """

    index: tuple[int, ...]
    baseline: float
    candidate: float
    sample: str | None = None
    position: int | None = None
    baseline_ranks: tuple[RankPlace, ...] = ()
    candidate_ranks: tuple[RankPlace, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """All figures of a - b over the compared elements, in float64; a is the baseline.

    relative: ||a - b|| / ||a||; 0/0 = 0, x/0 = inf. slope: <a, b> / <a, a>, 1 where both are 0. cosine: 1 where both
    are 0. max_ulp: the largest distance in representable numbers of the dtype; ``None`` for what is not floating.
    worst: ``None`` where nothing differs.
    """

    num_elements: int
    num_different: int
    max_abs: float
    norm: float
    relative: float
    slope: float
    cosine: float
    max_ulp: int | None
    worst: WorstElement | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Locality:
    """A part of a tensor in which the difference is concentrated.

    dim, first, last: indices along a dimension, both included, as head 3 or tokens 40 to 55. share: of ||a - b||²,
    0 to 1. fraction: of the tensor's elements. text: in words, with the boundary that it coincides with, if any.
    """

    dim: DimName
    first: int
    last: int
    share: float
    fraction: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """What a difference looks like.

    value: the ratio or offset that was found. explained: of ||a - b||², 0 to 1, how much the explanation accounts for.
    text: in words, such as ``candidate is 2.000 times the baseline: tp``.
    """

    kind: ResidualKind
    value: float
    explained: float
    text: str
