"""Sketches: a few hundred bytes of a tensor that say whether another has the same bits, and about how far it is off.

Contract. A sketch is linear: sketches of disjoint parts of a tensor add up to the sketch of the whole, exactly in
counts and fingerprint, to rounding in sums. The factor of an element depends on its index in the whole tensor alone
(``constants``), so two layouts, or two programs, give comparable sketches.

- *Sums*: an element goes with its sign into one of 2,039 slots, and the slots with further signs into each of the B
  buckets, divided by sqrt(B), all in float64. The squares of the buckets add up to about the tensor's squared norm, and
  so do the squares of two sketches' difference to the tensors' difference (Charikar, Chen and Farach-Colton,
  ICALP 2002, for the slots; Achlioptas, JCSS 2003, for the buckets). NaN and infinities count as 0 there.
- *Fingerprint*: the sum over all elements of ``key(i) * word(x_i)`` mod 2^64, times a factor of the dtype. The word is
  the integer of the element's bits, in two's complement; of a 64-bit element the lower half plus ``UPPER_HALF`` times
  the upper one. Keys are odd, so one changed element of up to 32 bits is always seen. Several changed elements cancel
  with a chance of about 2^-63, times 2^z where all changes of words are multiples of 2^z: for 32 bits at most 2^-32,
  where nothing but signs changed, which the sums show unless it is the sign of zeros.

The index is taken modulo 2^64. Elements of two rows by content (``entries.virtual_start``) may then have one index,
with a chance of 2^(k - 42) for each pair of rows, where 2^k is the largest power of two in the width, and 2^-40 at
least. Only an exact exchange of such elements between the two rows is not seen.

Error bar. If d is the difference of two tensors and e the estimate of its norm, then e² / ‖d‖² has the mean 1 and a
variance of at most 2 / n with 1 / n = 1 / B + 1 / 2039: the second term comes from elements that meet in a slot. For
spread differences e² / ‖d‖² is distributed as chi² with n degrees of freedom divided by n. For concentrated ones it
varies less: a single element is estimated exactly, and k elements of equal size miss each other in the slots but with a
chance of k² / 4078, and random signs over buckets have no larger moments than normal variables (Achlioptas, lemma 5.2).
The bar is the central 98 % of chi², where 95 % is promised, with the quantiles of Wilson and Hilferty (1931). It does
not hold for a difference in a few columns alone of a matrix whose rows are a multiple of 2,039 elements long, since
there up to 32 of a column's elements share a slot: that is the price of one table for all blocks.
Rounding adds ``u * sqrt(additions)`` of the norms, u = 2^-53, since rounding errors have random signs;
eight times that is allowed for on both sides. So rounding of sums never looks like a difference of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt

import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.support.tensor_bytes import dtype_name
from mock_scheduler.trace.shards import ShardSpec, whole
from mock_scheduler.trace.sketch.constants import BLOCK, MAX_BUCKETS, NUM_SLOTS, ROWS, bucket_weights, dtype_key
from mock_scheduler.trace.sketch.sums import SketchSums

NUM_BUCKETS = 64

_WORDS = 1 << 64
_QUANTILE = 2.326347874  # of the normal distribution at 99 %
_ROUNDING = 8.0 * 2.0**-53
_FOLDED_AT_ONCE = 256
#: Below it squares lose digits, or are 0.
_SMALLEST_NORM = 1e-150


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sketch:
    """Holds the summary kept of a tensor, or of a part of one.

    sums: float64 ``[B]`` on the CPU. sum_of_squares: of all finite elements, exact to rounding; inf where it overflows.
    fingerprint: 0 to 2^64 - 1.
    """

    sums: torch.Tensor
    sum_of_squares: float
    num_elements: int
    num_nan: int
    num_infinite: int
    fingerprint: int

    @property
    def norm(self) -> float:
        """Returns the Frobenius norm of the finite elements."""
        return sqrt(self.sum_of_squares)

    @property
    def num_buckets(self) -> int:
        """Returns B."""
        return len(self.sums)

    def is_identical(self, other: Sketch) -> bool:
        """Whether both tensors, if they have the same shape and dtype, have the same bits.

        Fingerprints of other dtypes all differ, except of zeros alone.
        """
        return (self.fingerprint, self.num_elements) == (other.fingerprint, other.num_elements)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """How far the tensors of two sketches are apart, over finite elements, others being taken as 0.

    norm_difference: about ||a - b||. relative: its ratio to ||a||; 0/0 = 0, x/0 = inf.
    low, high: between them lies the true relative difference in at least 95 % of all cases; 0 and 0 for equal bits.
    """

    norm_difference: float
    relative: float
    low: float
    high: float


def sketch_piece(tensor: torch.Tensor, spec: ShardSpec, *, num_buckets: int = NUM_BUCKETS) -> Sketch:
    """The sketch of one rank's piece, as part of the whole tensor; on the device where the piece is.

    ``tensor``: has ``spec.local_shape``, or is flat with just the elements of ``spec.flat_range``; any dtype but
    complex ones. Raises ``TraceError`` where it does not, and where there are not 1 to 4096 buckets.
    """
    sums = SketchSums(tensor.dtype, tensor.device)
    sums.add(tensor, spec)
    return finish_sketches([sums], num_buckets=num_buckets)[0]


def sketch_of(
    tensor: torch.Tensor,
    present: torch.Tensor | None = None,
    *,
    num_buckets: int = NUM_BUCKETS,
    spec: ShardSpec | None = None,
) -> Sketch:
    """The sketch of a whole tensor; where ``present`` is not ``None``, of just its elements where it is True.

    ``present``: bool, of the tensor's shape or one that broadcasts to it. ``spec``: the places of its elements;
    ``None`` for the tensor's own.
    """
    spec = whole("the tensor", tuple(tensor.shape)) if spec is None else spec
    if present is None:
        return sketch_piece(tensor, spec, num_buckets=num_buckets)
    mask = present.expand(tensor.shape)
    sums = SketchSums(tensor.dtype, tensor.device)
    sums.add(torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device)), spec)
    sums.num_elements = int(mask.sum())
    return finish_sketches([sums], num_buckets=num_buckets)[0]


def finish_sketches(all_sums: Sequence[SketchSums], *, num_buckets: int) -> list[Sketch]:
    """Finishes the sketches of the given sums; raises ``TraceError`` where there are not 1 to 4096 buckets."""
    if not 1 <= num_buckets <= MAX_BUCKETS:
        raise TraceError(f"a sketch has 1 to {MAX_BUCKETS} buckets, not {num_buckets}; change trace.sketch_buckets")
    sketches: list[Sketch] = []
    for start in range(0, len(all_sums), _FOLDED_AT_ONCE):
        group = all_sums[start : start + _FOLDED_AT_ONCE]
        # The one place that waits for a device, once for each part of all these tensors.
        slots = _on_host([sums.totals.slots for sums in group])
        squares = _on_host([sums.totals.sum_of_squares for sums in group]).tolist()
        counts = _on_host([sums.totals.counts for sums in group]).tolist()
        # Without a BLAS call on the device, whose sums have no fixed order everywhere.
        buckets = slots @ bucket_weights(num_buckets)
        sketches += [
            Sketch(
                sums=buckets[index],
                sum_of_squares=squares[index],
                num_elements=sums.num_elements,
                num_nan=counts[index][1],
                num_infinite=counts[index][2],
                fingerprint=counts[index][0] * dtype_key(dtype_name(sums.dtype)) % _WORDS,
            )
            for index, sums in enumerate(group)
        ]
    return sketches


def _on_host(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stacks tensors on the CPU, with one copy from each device."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) == 1:
        return torch.stack(list(tensors)).cpu()
    return torch.stack([tensor.cpu() for tensor in tensors])


def add(first: Sketch, second: Sketch) -> Sketch:
    """The sketch of two disjoint parts of a tensor together; raises ``TraceError`` for other numbers of buckets."""
    _check_buckets(first, second)
    return Sketch(
        sums=first.sums + second.sums,
        sum_of_squares=first.sum_of_squares + second.sum_of_squares,
        num_elements=first.num_elements + second.num_elements,
        num_nan=first.num_nan + second.num_nan,
        num_infinite=first.num_infinite + second.num_infinite,
        fingerprint=(first.fingerprint + second.fingerprint) % _WORDS,
    )


def difference(baseline: Sketch, candidate: Sketch) -> Estimate:
    """How far two tensors are apart; raises ``TraceError`` where the sketches have other numbers of buckets.

    NaN and infinities are not in the estimate: compare the counts of both sketches too. Where squares overflow or
    underflow, which takes norms above 1e154 or below 1e-150, the bounds are 0 and inf.
    """
    _check_buckets(baseline, candidate)
    norm = baseline.norm
    if baseline.is_identical(candidate):
        return Estimate(norm_difference=0.0, relative=0.0, low=0.0, high=0.0)
    estimate = _norm_of(baseline.sums - candidate.sums)
    if not isfinite(estimate) or not isfinite(norm):
        return Estimate(norm_difference=estimate, relative=inf, low=0.0, high=inf)
    # Squares of the elements underflowed; the sums, which are not squared, still tell the size.
    if norm < _SMALLEST_NORM and bool(baseline.sums.any()):
        norm = _norm_of(baseline.sums)
        return Estimate(norm_difference=estimate, relative=_ratio(estimate, norm), low=0.0, high=inf)
    rounding = rounding_bound(max(norm, candidate.norm), max(baseline.num_elements, candidate.num_elements))
    low, high = relative_bounds(baseline.num_buckets)
    return Estimate(
        norm_difference=estimate,
        relative=_ratio(estimate, norm),
        low=_ratio(max(estimate - rounding, 0.0) * low, norm),
        high=_ratio((estimate + rounding) * high, norm),
    )


def relative_bounds(num_buckets: int) -> tuple[float, float]:
    """The true norm of a difference lies between these factors of its estimate; as the module's docstring derives."""
    # The quantiles of chi² by Wilson and Hilferty; see the error bar above.
    freedom = 1.0 / (1.0 / num_buckets + 1.0 / NUM_SLOTS)
    spread = 2.0 / (9.0 * freedom)
    least, largest = (1.0 - spread + sign * _QUANTILE * sqrt(spread) for sign in (-1.0, 1.0))
    return largest**-1.5, max(least, 1e-3) ** -1.5


def rounding_bound(norm: float, num_elements: int) -> float:
    """How far sums of the same elements in two orders may be apart, as a norm."""
    num_additions = ROWS + num_elements / BLOCK + NUM_SLOTS
    return _ROUNDING * sqrt(num_additions) * norm


def _check_buckets(first: Sketch, second: Sketch) -> None:
    if first.num_buckets != second.num_buckets:
        raise TraceError(
            f"sketches with {first.num_buckets} and {second.num_buckets} buckets cannot be compared; run both with the "
            "same trace.sketch_buckets"
        )


def _norm_of(values: torch.Tensor) -> float:
    """The norm, also where squares of single values would underflow."""
    largest = float(values.abs().max())
    if largest == 0.0 or not isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(values / largest))


def _ratio(value: float, norm: float) -> float:
    if value == 0.0:
        return 0.0
    return value / norm if norm else inf
