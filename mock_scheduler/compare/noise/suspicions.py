"""What is within every bound and still no noise, as plain data, and the tests that looked for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NoiseTest = Literal["slope", "locality", "drift"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspicion:
    """Something systematic. test: that found it. step, update: where it first shows; ``None`` where it is over all.

    name: canonical, or a metric's; empty where all tensors of an update share it. value, limit: of what the test looks
    at (|slope - 1|, a place's relative difference, the mean change in units of the noise), for reports. text: in words.
    """

    test: NoiseTest
    step: int | None
    update: int | None
    name: str
    value: float
    limit: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TestSummary:
    """What one test looked at. num_looked_at: tensors, updates or series. smallest: the smallest relative error that it
    would have found, or ``None`` where that cannot be said. text: in words, for a verdict that passes."""

    test: NoiseTest
    num_looked_at: int
    smallest: float | None
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseVerdict:
    """All tests together; ``suspicions`` in the order of computation, the drifts last."""

    suspicions: tuple[Suspicion, ...]
    tests: tuple[TestSummary, ...]
