"""Tests for errors within every bound that are still no noise; what it finds is plain data.

``verdict.wording.bounds`` puts them into words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mock_scheduler.comparison.residuals import Locality
from mock_scheduler.comparison.thresholds import LARGEST_SIGMA, SAFETY
from mock_scheduler.trace.entries import TraceKey

NoiseTest = Literal["slope", "locality", "drift"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledGradients:
    """All gradients of an update have another scale.

    Args:
        ratio: 1 + the median of their slopes - 1.
        factor: The number of the layouts equal to the ratio, if any.
        num_tensors: Gradients with a slope.
        z: Of the median.
        noise_z: The largest of the perturbed runs; ``None`` behind a forward pass equal to the last bit, where no such
            measure is needed.
    """

    ratio: float
    factor: str | None
    num_tensors: int
    z: float
    noise_z: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledTensor:
    """One tensor has another scale, and ``num_others`` of its kind and update besides.

    Args:
        key: Of the first in the order of computation.
        ratio: Its slope ``<a, b> / <a, a>``.
        factor: The number of the layouts equal to the ratio, if any.
        num_others: How many more there are.
        is_behind_equal_forward: The forward pass before it is equal to the last bit.
    """

    key: TraceKey
    ratio: float
    factor: str | None
    num_others: int
    is_behind_equal_forward: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisyPlace:
    """A place in a tensor differs by more than it does in any perturbed run."""

    key: TraceKey
    locality: Locality


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """Holds the course of a series over steps.

    Args:
        num_signs: Changes other than 0.
        sigma: (n₊ - n₋) / √n of the candidate.
        mean: Of its changes in units of noise.
        noise_mean: The largest |mean| of the perturbed runs.
    """

    num_signs: int
    sigma: float
    mean: float
    noise_mean: float

    @property
    def is_one_way(self) -> bool:
        """Whether it goes one way, and further than perturbed runs do."""
        # Steps are not independent, so signs alone fire on honest runs; these part from the baseline in the same way.
        return abs(self.sigma) > LARGEST_SIGMA and abs(self.mean) > SAFETY * self.noise_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspicion:
    """A systematic difference that hides within the noise, found by a test of slope, place or drift.

    Args:
        test: The test it was found by.
        step: Where it first shows; ``None`` where it is over all steps.
        update: As ``step``.
        name: Canonical, or a metric's; empty where all gradients of an update share it.
        value: The tested figure: |slope - 1|, a place's share, the mean change in units of the noise.
        limit: Noise makes at most so much of it.
        fact: All that was found.
    """

    test: NoiseTest
    step: int | None
    update: int | None
    name: str
    value: float
    limit: float
    fact: ScaledGradients | ScaledTensor | NoisyPlace | Drift


@dataclass(frozen=True, kw_only=True, slots=True)
class TestSummary:
    """Holds the extent of one test.

    Args:
        test: Its name.
        num_looked_at: Tensors or series; 0 where it could not be made.
        together: The smallest error of scale of all gradients of an update it would have found.
        alone: The same of one tensor, the median of a kind and update.
    """

    test: NoiseTest
    num_looked_at: int
    together: float | None = None
    alone: float | None = None

    @property
    def smallest(self) -> float | None:
        """The smallest relative error it would have found; ``None`` where unknown."""
        return min((limit for limit in (self.together, self.alone) if limit is not None), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseVerdict:
    """Holds all tests together; ``suspicions`` in the order of computation, the drifts last."""

    suspicions: tuple[Suspicion, ...]
    tests: tuple[TestSummary, ...]
