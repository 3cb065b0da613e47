"""Defines what is summed of a tensor on the way to its sketch, and the word of an element for the fingerprint."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mock_scheduler.trace.sketch.constants import NUM_SLOTS, UPPER_HALF

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNED_UPPER_HALF = UPPER_HALF - (1 << 64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Totals:
    """Holds the sums over some elements of one tensor, all on one device.

    slots: float64 ``[NUM_SLOTS]``. sum_of_squares: float64 ``[]``. counts: int64 ``[3]``: the fingerprint without the
    factor of the dtype, NaN, infinities.
    """

    slots: torch.Tensor
    sum_of_squares: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def zero(cls, device: torch.device) -> Totals:
        """Returns the sums over nothing."""
        return cls(
            slots=torch.zeros(NUM_SLOTS, dtype=torch.float64, device=device),
            sum_of_squares=torch.zeros((), dtype=torch.float64, device=device),
            counts=torch.zeros(3, dtype=torch.int64, device=device),
        )

    def add_(self, other: Totals) -> None:
        """Add the sums over other elements, on any device."""
        self.slots.add_(other.slots.to(self.slots.device))
        self.sum_of_squares.add_(other.sum_of_squares.to(self.slots.device))
        self.counts.add_(other.counts.to(self.slots.device))


def write_words(words: torch.Tensor, window: torch.Tensor) -> None:
    """Write to int64 ``words`` the word of each element's bits for the fingerprint.

    Bits of 64-bit elements are taken as halves, since their highest ones alone would lose most bits of the key.
    """
    size = window.element_size()
    bits = window.view(_INTEGERS[size])
    if size < 8:
        words.copy_(bits)
        return
    torch.bitwise_right_shift(bits, 32, out=words)
    words.mul_(_SIGNED_UPPER_HALF).add_(bits & 0xFFFFFFFF)
