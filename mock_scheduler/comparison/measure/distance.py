"""How far two tensors are apart, and how far they may be.

All sums are in float64 and by chunks (``lanes``), so nothing larger than a chunk is made beside the tensors.

- A tensor of the forward or backward pass is judged by ||a - b|| / ||a|| and its bound (``bounds``). A bound not
  measured for this tensor gets the *rounding* added no such tensor can be without: 16 units in the last place of the
  root mean square of all baseline tensors of its kind and update (a gradient with a true value of 0 was measured at 0.3
  to 0.9 of them). So a bias to which softmax is blind, or a mean cancelling to 0, is not held to figures of its own
  noise. Measured bounds contain it, except for a tensor no perturbation moved at all.
- A *parameter* is judged by the update: with d the change from before to after it, ||d_a - d_b|| / ||d_a||. A norm
  relative to the parameter itself would hide a frozen or reversed optimizer at the learning rates of reinforcement
  learning. Elements are left out and counted where their gradients differ by more than 4 times the whole gradient's
  difference, each relative to its own size: where a gradient is nothing but rounding (a key bias again), Adam makes its
  sign a full step. So the share left out is the same in every precision (16 % of small models), and the rest does not
  hang on a few flips. A bound that was not measured grows by the spacing of the floating-point numbers the parameter is
  stored in.
- Integers must be equal; their relative difference is the fraction of unequal elements. Choices of experts may differ
  for as many tokens as they were measured to.

Where noise or rounding makes a bound larger than 0.5, the tensor is *not judged*, and reports count it; beyond the
bound it still exceeds it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from mock_scheduler.comparison.bounds.bound import TensorBound
from mock_scheduler.comparison.findings import NonFinite
from mock_scheduler.comparison.measure.changes import Changes, Pair, sum_changes
from mock_scheduler.comparison.measure.figures import PairSums, compute_figures, sum_values
from mock_scheduler.comparison.measure.large_tensors import split_blocks
from mock_scheduler.comparison.tensors import Figures, TensorDifference
from mock_scheduler.comparison.thresholds import (
    CHUNK_ELEMENTS,
    LARGEST_SIGNIFICANT,
    LARGEST_SIGNIFICANT_UNMEASURED,
    NUM_ULPS,
    POOL_ROUNDING_UNITS,
    SIGNIFICANT,
)
from mock_scheduler.support.tensor_bytes import dtype_name, have_equal_bytes
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.whole import Values, WholeTensor, read_together


def is_bit_equal(left: Values, right: Values) -> bool:
    """Whether two tensors have one dtype, one shape and equal bits."""
    return left.dtype == right.dtype and is_rounded(left, right)


def is_rounded(weight: Values, value: Values) -> bool:
    """Whether a tensor has the bits of another one of its shape, cast to its dtype; ends at the first other range."""
    sides = [WholeTensor.of(weight), WholeTensor.of(value)]
    return weight.shape == value.shape and all(
        have_equal_bytes(rounded, wide.to(weight.dtype))
        for block in split_blocks(weight.numel())
        for _, (rounded, wide) in read_together(sides, *block, CHUNK_ELEMENTS)
    )


def count_non_finite(tensor: torch.Tensor) -> NonFinite | None:
    """Counts elements equal to NaN and infinity; ``None`` where all are finite."""
    if not tensor.dtype.is_floating_point or not tensor.numel() or _is_finite(tensor):
        return None
    return NonFinite(
        num_nan=int(tensor.isnan().sum()), num_infinite=int(tensor.isinf().sum()), num_elements=tensor.numel()
    )


def find_significant(relative: float, bound: TensorBound) -> float:
    """Returns by which fraction of itself an element's gradient may differ for the element to have a say in its update.

    Args:
        relative: Relative difference of the whole gradient.
        bound: Of the update.
    """
    # Where all of a gradient is noise, so is every step made of it; only a measured bound knows.
    largest = LARGEST_SIGNIFICANT_UNMEASURED if bound.has_rounding else LARGEST_SIGNIFICANT
    # Adam divides by the size of an element's own gradient, so an element that is all noise moves as far as any other.
    return min(SIGNIFICANT * relative, largest)


def measure(
    key: TraceKey,
    baseline: Values,
    candidate: Values,
    *,
    bound: TensorBound,
    present: torch.Tensor | None = None,
    sums: PairSums | None = None,
) -> TensorDifference:
    """Measures the relative difference of two finite tensors of one shape, over the elements where ``present`` is True.

    Args:
        key: Of the tensor.
        baseline: Any dtype; the values of two dtypes are compared in float64.
        candidate: As the baseline.
        bound: Not complete yet: ``with_rounding`` makes it so.
        present: bool, as of ``compute_figures``.
        sums: Of these elements; ``None`` computes them.
    """
    dtypes = None
    if baseline.dtype != candidate.dtype:
        dtypes = (dtype_name(baseline.dtype), dtype_name(candidate.dtype))
    if sums is None:
        sums = sum_values(WholeTensor.of(baseline), WholeTensor.of(candidate), present)
    figures = sums.figures
    bit_equal = dtypes is None and figures.num_different == 0
    # Numbers of experts or tokens are names, whose distance means nothing.
    is_number = baseline.dtype.is_floating_point or candidate.dtype.is_floating_point
    fraction = figures.num_different / max(figures.num_elements, 1)
    return TensorDifference(
        key=key,
        num_elements=figures.num_elements,
        num_absent=baseline.numel() - figures.num_elements,
        bit_equal=bit_equal,
        max_abs=figures.max_abs,
        relative=figures.relative if is_number else fraction,
        tolerance=bound.relative if is_number else bound.fraction,
        distance=figures.norm,
        size=sums.norm,
        is_estimate=bound.is_estimate and is_number,
        is_within_ulp=figures.max_ulp is not None and figures.max_ulp <= NUM_ULPS and dtypes is None,
        figures=None if bit_equal else figures,
        dtypes=dtypes,
    )


def with_rounding(difference: TensorDifference, bound: TensorBound, *, usual: float, unit: float) -> TensorDifference:
    """Returns the difference with all of its bound.

    Args:
        difference: As ``measure`` returns it.
        bound: Of the tensor.
        usual: Root mean square of all baseline tensors of its kind and update.
        unit: Spacing of its numbers at 1.
    """
    # A float32 value computed from bfloat16 numbers is as coarse as these.
    unit = max(unit, bound.unit)
    # Roundings of n elements have no common sign, so that their norm grows with √n.
    rounding = POOL_ROUNDING_UNITS * unit * usual * math.sqrt(difference.num_elements) if bound.has_rounding else 0.0
    relative, tolerance = relate(
        difference.distance, difference.size, rounding=bound.absolute + rounding, tolerance=bound.relative
    )
    return replace(difference, relative=relative, tolerance=tolerance, is_zero=difference.size == 0.0)


def relate(difference: float, size: float, *, rounding: float, tolerance: float) -> tuple[float, float]:
    """Returns a difference relative to ``size``, and its bound with the rounding; for a size of 0, 0 or infinite."""
    if size:
        return difference / size, tolerance + rounding / size
    # Nothing is relative to 0: the rounding alone decides, and the bound says whether it could.
    return (0.0, math.inf) if difference <= rounding else (math.inf, tolerance)


def compare_updates(
    key: TraceKey,
    *,
    before: Pair,
    after: Pair,
    gradients: Pair | None,
    significant: float,
    bound: TensorBound,
    figures: Figures | None = None,
    is_same_before: bool | None = None,
) -> TensorDifference:
    """Compares one update of a parameter in both runs, as the module's docstring says.

    Each pair is (baseline, candidate), all finite and of one shape.

    Args:
        key: Of the parameter after the update.
        before: The parameter before it.
        after: The parameter after it.
        gradients: The update is made from them; ``None`` where they tell no elements apart, being equal.
        significant: As ``find_significant`` returns it.
        bound: Of the update.
        figures: Of the parameters after it; ``None`` computes them.
        is_same_before: The parameters before it have equal bits; ``None`` finds it out.
    """
    # The parameters themselves, for the figures; the change, for the verdict.
    figures = compute_figures(*after) if figures is None else figures
    is_same_before = is_bit_equal(*before) if is_same_before is None else is_same_before
    bit_equal = figures.num_different == 0 and is_same_before
    # What is equal needs no bound, and summing what the update did costs more than all else.
    sums = Changes() if bit_equal else sum_changes(before, after, gradients, significant, is_same_before=is_same_before)
    # Two changes are compared in float64, since the parameters they are taken from nearly cancel.
    relative, tolerance = (0.0, bound.relative)
    if not bit_equal:
        rounding = bound.absolute + (sums.rounding if bound.has_rounding else 0.0)
        relative, tolerance = relate(sums.distance, sums.size, rounding=rounding, tolerance=bound.relative)
    return TensorDifference(
        key=key,
        num_elements=after[0].numel(),
        bit_equal=bit_equal,
        max_abs=figures.max_abs,
        relative=relative,
        tolerance=tolerance,
        distance=sums.distance,
        size=sums.size,
        is_estimate=bound.is_estimate,
        num_excluded=sums.num_excluded,
        is_zero=is_bit_equal(before[0], after[0]),
        is_within_ulp=figures.max_ulp is not None and figures.max_ulp <= NUM_ULPS,
        figures=figures if figures.num_different else None,
    )


def rounding_unit(dtype: torch.dtype) -> float:
    """Returns the spacing of its numbers at 1; 0 for integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite: the smallest and the largest show it, in one cheap pass."""
    # A NaN anywhere makes both NaN.
    low, high = torch.aminmax(tensor)
    return math.isfinite(low) and math.isfinite(high)
