"""Values that were rounded to fewer bits than their type has.

A number of ``n`` bits of mantissa has zeros below them. Of 16 different numbers that were not rounded, all end in four
zeros by chance once in 2^64. So a tensor with fewer bits than the baseline's was rounded to a narrower type, or made of
nothing else.

Gradients are sums of such numbers, and divided by a number of tokens, so their own bits are full. Multiplied by the
right whole number, sums of few rounded numbers are short again: *short* elements have at most 12 bits of mantissa,
which one number of 2^11 has by chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.comparison.measure.large_tensors import split_chunks
from mock_scheduler.comparison.thresholds import (
    DIVISION_ROUNDINGS,
    FEWEST_ELEMENTS,
    FEWEST_NARROWED,
    LARGEST_DIVISOR,
    LEAST_NARROWING,
    NARROWED_SAMPLE,
    SHORT_BITS,
)
from mock_scheduler.support.tensor_bytes import view_as_bits
from mock_scheduler.trace.full.whole import Values, WholeTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortSums:
    """Elements of the gradients of one update: the divisor at which most are short, and what is known of them there.

    Args:
        divisor: Whole; 1 where nothing was divided.
        short: The part of the elements that are short, 0 to 1.
        bits: The mean of the elements' bits; one more than short ones have for those that are not.
    """

    divisor: int
    short: float
    bits: float


def stored_bits(dtype: torch.dtype) -> int:
    """Returns the bits of a mantissa beside the leading one; 0 of integers."""
    return -int(math.log2(torch.finfo(dtype).eps)) if dtype.is_floating_point else 0


def count_bits(tensor: Values) -> int | None:
    """Counts the bits of mantissa that elements have; ``None`` where too few different ones could tell.

    ``tensor``: on the CPU, of any dtype.
    """
    stored = stored_bits(tensor.dtype)
    if not stored:
        return None
    # Copies of a few numbers, such as ratios of 1, are short by themselves.
    if len(torch.unique(_first_nonzero(WholeTensor.of(tensor)))) < FEWEST_ELEMENTS:
        return None
    # Zeros have no bits, so that they need not be left out.
    return used_bits(tensor)


def _first_nonzero(values: WholeTensor) -> torch.Tensor:
    """Returns the first ``NARROWED_SAMPLE`` elements that are not 0; fewer where there are no more."""
    found, count = [torch.empty(0, dtype=values.dtype)], 0
    for start, stop in split_chunks(0, values.numel()):
        # Mostly none is 0, so that the first part has enough.
        for part in values.read(start, stop).split(NARROWED_SAMPLE):
            found.append(part[part != 0])
            count += len(found[-1])
            if count >= NARROWED_SAMPLE:
                return torch.cat(found)[:NARROWED_SAMPLE]
    return torch.cat(found)


def used_bits(tensor: Values) -> int:
    """Counts the bits of mantissa down to the lowest one that any element has; ``tensor``: floating point."""
    stored = stored_bits(tensor.dtype)
    values, together = WholeTensor.of(tensor), 0
    for start, stop in split_chunks(0, values.numel()):
        bits = view_as_bits(values.read(start, stop)).numpy()
        together |= int(np.bitwise_or.reduce(bits)) & ((1 << stored) - 1)
        # No element has more; of numbers that were not rounded, the first few already have all.
        if together & 1:
            break
    return stored - (together & -together).bit_length() + 1 if together else 0


def find_narrowing(baseline: Values, candidate: Values) -> tuple[int, int] | None:
    """Finds the bits of mantissa that a candidate was rounded to, and the baseline's; ``None`` where it has as many."""
    theirs = count_bits(candidate)
    if theirs is None or baseline.dtype != candidate.dtype or stored_bits(baseline.dtype) - theirs < LEAST_NARROWING:
        return None
    mine = count_bits(baseline)
    # Against the baseline and not the type: whole models are loaded from narrower numbers.
    return (theirs, mine) if mine is not None and mine - theirs >= LEAST_NARROWING else None


def find_sums(sample: torch.Tensor, *, divisor: int | None = None) -> ShortSums | None:
    """Finds the divisor that makes most elements short; ``None`` where there is none.

    Args:
        sample: float32 ``[n]``.
        divisor: The only one that is tried.
    """
    values = sample[sample != 0].double().numpy()
    if len(values) < FEWEST_NARROWED:
        return None
    divisors = np.arange(1, LARGEST_DIVISOR + 1) if divisor is None else np.array([divisor])
    is_short = _is_short(values[:, None] * divisors[None, :], SHORT_BITS)
    share = is_short.mean(axis=0)
    # The smallest of equally good ones: multiples by a power of two are as good.
    best = int(share.argmax())
    multiplied = values * divisors[best]
    bits = np.full(len(values), SHORT_BITS + 1)
    for count in range(SHORT_BITS, -1, -1):
        bits[_is_short(multiplied, count)] = count
    return ShortSums(divisor=int(divisors[best]), short=float(share[best]), bits=float(np.mean(bits)))


def _is_short(values: npt.NDArray[np.float64], bits: int) -> npt.NDArray[np.bool_]:
    """Whether values have at most so many bits of mantissa, but for the rounding of float32."""
    mantissas, _ = np.frexp(np.abs(values))
    whole = np.ldexp(mantissas, bits + 1)
    # A division and its product in float32 leave up to 1.5 roundings of 24 bits.
    return np.asarray(np.abs(whole - np.rint(whole)) <= np.ldexp(DIVISION_ROUNDINGS, bits - stored_bits(torch.float32)))
