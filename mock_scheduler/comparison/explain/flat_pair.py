"""Two tensors as flat float64 elements, few enough to look at them several times."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mock_scheduler.comparison.residuals import Sample
from mock_scheduler.comparison.tensors import Figures
from mock_scheduler.comparison.thresholds import FEWEST_ELEMENTS, SAMPLE_ELEMENTS


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlatPair:
    """Flat float64 elements, 0 in both where absent; a is the baseline.

    Args:
        stride: Distance of neighbouring elements in the tensor.
        square: ``||a - b||²``.
        num_elements: Elements of the tensor that are present.
        eps: Spacing of its numbers at 1; 0 where it has no floats.
        rounding: A relative difference that is no larger may be rounding.
        sample: How many elements these are; ``None`` where they are all.
    """

    baseline: torch.Tensor
    candidate: torch.Tensor
    difference: torch.Tensor
    present: torch.Tensor | None
    square: float
    stride: int
    num_elements: int
    eps: float
    rounding: float
    sample: Sample | None

    @property
    def is_small(self) -> bool:
        """Whether a fitted number would prove nothing."""
        return self.num_elements < FEWEST_ELEMENTS

    def explained(self, remainder: torch.Tensor) -> float:
        """Returns the part of ||a - b||² an explanation with this remainder accounts for."""
        return 1.0 - square_of(remainder) / self.square if self.square else 0.0


def flatten(
    baseline: torch.Tensor,
    candidate: torch.Tensor,
    present: torch.Tensor | None,
    figures: Figures,
    *,
    rounding: float,
) -> FlatPair:
    """Takes at most 1 Mi evenly spaced elements of both; ``rounding``: as of ``FlatPair``."""
    stride = max(math.ceil(baseline.numel() / SAMPLE_ELEMENTS), 1)
    # Columns are mostly even in number, so that an even stride would never see half of them.
    stride += stride > 1 and stride % 2 == 0
    mask = None if present is None else present.expand(baseline.shape).reshape(-1)[::stride]
    mine, other = (spread(side, stride, mask) for side in (baseline, candidate))
    difference = other - mine
    return FlatPair(
        baseline=mine,
        candidate=other,
        difference=difference,
        present=mask,
        square=square_of(difference),
        stride=stride,
        num_elements=figures.num_elements,
        eps=torch.finfo(baseline.dtype).eps if baseline.is_floating_point() else 0.0,
        rounding=rounding,
        sample=Sample(num_seen=mine.numel(), num_elements=baseline.numel()) if stride > 1 else None,
    )


def spread(tensor: torch.Tensor, stride: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Returns float64: every ``stride``-th element; 0 where the mask is False and where it is not finite."""
    values = tensor.reshape(-1)[::stride].double()
    # NaN and infinity are findings by themselves, and would explain nothing else.
    values = values.where(values.isfinite(), 0.0)
    return values if mask is None else values.where(mask, 0.0)


def square_of(values: torch.Tensor) -> float:
    """Returns the sum of squares of a flat float64 tensor."""
    return float(torch.dot(values, values))
