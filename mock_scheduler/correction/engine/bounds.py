"""A rule's bounds in the units of what it measures, and what is beyond them."""

from __future__ import annotations

import math

import numpy as np
import torch

from mock_scheduler.correction.config.rules import Rule


def is_above(values: torch.Tensor, bound: float) -> torch.Tensor:
    """bool: which values, float32 or float64, are above the bound as their dtype has it."""
    if values.is_cpu:
        # numpy takes a seventh of torch's time.
        array = values.numpy()
        return torch.from_numpy(np.asarray(array > array.dtype.type(bound)))
    return values > torch.tensor(bound, dtype=values.dtype, device=values.device)


def is_below(values: torch.Tensor, bound: float) -> torch.Tensor:
    """The same of those below it."""
    if values.is_cpu:
        array = values.numpy()
        return torch.from_numpy(np.asarray(array < array.dtype.type(bound)))
    return values < torch.tensor(bound, dtype=values.dtype, device=values.device)


def value_bounds(rule: Rule) -> tuple[float | None, float | None]:
    """The bounds in the units of the values: logarithms for ratios."""
    if rule.estimator != "ratio":
        return rule.lower, rule.upper
    lower, upper = (None if bound is None else math.log(bound) for bound in (rule.lower, rule.upper))
    return lower, upper
