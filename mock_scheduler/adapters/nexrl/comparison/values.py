"""How far two values are apart: exact, in units in the last place, and against a tolerance.

Contract: nothing is converted before it is compared, but for floats of two precisions: they are compared in float64
and reported as of two dtypes. NaN equals NaN and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from mock_scheduler.support.tensor_bytes import dtype_name

Status = Literal["identical", "close", "different", "dtype", "shape", "unusable", "missing_first", "missing_second"]
"""``close``: within the tolerance. ``dtype``: of two, whatever the values. ``unusable``: neither number nor tensor."""

PASSING: tuple[Status, ...] = ("identical", "close")
MISSING: tuple[Status, ...] = ("missing_first", "missing_second")

_BIT_TYPES = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Two numbers are close where |a - b| <= atol + rtol · max(|a|, |b|): the same whichever comes first."""

    atol: float = 1e-5
    rtol: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The result. ``max_abs``, ``mean_abs``: of |a - b|, infinite where NaN stands against a number; None where
    nothing could be compared. ``max_ulp``: None for integers and across dtypes. ``worst``: flat index of the largest.
    """

    status: Status
    num_compared: int = 0
    max_abs: float | None = None
    mean_abs: float | None = None
    max_ulp: int | None = None
    worst: int | None = None
    num_nan_mismatches: int = 0
    detail: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether it speaks for the dumps being the same."""
        return self.status in PASSING


def compare_tensors(first: torch.Tensor, second: torch.Tensor, tolerance: Tolerance) -> Difference:
    """Two tensors element by element; those of no element are identical, with ``num_compared`` 0."""
    if first.shape != second.shape:
        return Difference(status="shape", detail=f"shape {list(first.shape)} against {list(second.shape)}")
    same_dtype = first.dtype == second.dtype
    detail = "" if same_dtype else f"{dtype_name(first.dtype)} against {dtype_name(second.dtype)}"
    one, other = first.reshape(-1), second.reshape(-1)
    if not one.numel():
        return Difference(status="identical" if same_dtype else "dtype", detail=detail)
    distance, num_nan = _distances(one, other)
    worst = int(distance.argmax())
    maximum = float(distance[worst])
    is_close = _are_close(one, other, distance, tolerance)
    status: Status = "dtype" if not same_dtype else "close" if is_close else "different"
    if maximum == 0.0 and same_dtype:
        status = "identical"
    return Difference(
        status=status,
        num_compared=one.numel(),
        max_abs=maximum,
        mean_abs=math.fsum(distance.tolist()) / one.numel(),
        max_ulp=_max_ulp(one, other) if same_dtype and not num_nan else None,
        worst=worst,
        num_nan_mismatches=num_nan,
        detail=detail,
    )


def compare_numbers(first: float, second: float, tolerance: Tolerance) -> Difference:
    """Two numbers of Python's; without ``max_ulp``, since the precision of their computation is unknown."""
    one, other = (torch.tensor([value], dtype=torch.float64) for value in (first, second))
    return replace(compare_tensors(one, other, tolerance), max_ulp=None)


def _distances(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, int]:
    """float64 |a - b|: 0 for NaN and NaN, infinite for NaN and a number; and how many of the latter there are."""
    if not one.is_floating_point() and not other.is_floating_point():
        if one.dtype != other.dtype:  # torch compares no uint16 with a bool
            one, other = one.long(), other.long()
        # Whole numbers are told apart as such: float64 cannot hold all of int64.
        return torch.where(one == other, 0.0, (one.double() - other.double()).abs().clamp(min=1.0)), 0
    a, b = one.double(), other.double()
    one_nan, other_nan = a.isnan(), b.isnan()
    distance = torch.where(a == b, 0.0, (a - b).abs())
    distance = torch.where(one_nan & other_nan, 0.0, torch.where(one_nan | other_nan, math.inf, distance))
    return distance, int((one_nan ^ other_nan).sum())


def _are_close(one: torch.Tensor, other: torch.Tensor, distance: torch.Tensor, tolerance: Tolerance) -> bool:
    if not one.is_floating_point() and not other.is_floating_point():
        return not bool(distance.any())
    size = torch.maximum(one.double().abs(), other.double().abs()).nan_to_num(0.0, 0.0, 0.0)
    return bool((distance <= tolerance.atol + tolerance.rtol * size).all())


def _max_ulp(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """The largest number of representable values between two; pairs of NaN do not count."""
    bits = _BIT_TYPES.get(one.dtype)
    if bits is None:
        return None
    kept = ~one.isnan()
    if not bool(kept.any()):
        return 0
    steps, others = (_ordered(value[kept].contiguous().view(bits)).tolist() for value in (one, other))
    # Python's numbers, since the distance of two float64 may be more than int64 holds.
    return max(abs(int(a) - int(b)) for a, b in zip(steps, others, strict=True))


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Bit patterns of floats as integers in the order of the floats, with both zeros at 0."""
    least = torch.iinfo(bits.dtype).min
    wide = bits.long()
    return torch.where(wide < 0, least - wide, wide)
