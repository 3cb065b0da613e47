"""Whether a candidate is a multiple of its baseline, from what is left when the best multiple is taken away.

A ratio c is recognised where it accounts for 90 % of ||a - b||². Where it is so near to 1 that noise hides it, that
fixed part is no measure; then it is recognised where all that it leaves is noise, and c is further from 1 than its own
uncertainty allows: where what it leaves is rounding at nearly every element, that is, at most the spacing of the
dtype's numbers there, since both sides were rounded by half of it; or where it leaves no more than the bound of the
tensor, and accounts for half of the difference. Digits that were cut off make a tensor smaller too, by steps of its
numbers' spacing rather than by a ratio: whichever leaves less is what it is. The standard error of c = <a, b> / <a, a>,
with a remainder r that grows with a, is √Σa²r² / Σa² (White, Econometrica 48, 1980). Of a ratio that is still too near
to 1, the gradients that were made from the same tensor may tell it: sums over all tokens, in float32, in which rounding
is averaged away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from mock_scheduler.compare.differences import Residual, ResidualKind
from mock_scheduler.compare.measure.factors import CLOSE, VERY_CLOSE, name_factor
from mock_scheduler.compare.measure.flat_pair import ENOUGH, FlatPair, square_of
from mock_scheduler.compare.tensors import TensorDifference

#: Elements of equal weight that a fitted number rests on.
_FEWEST_EQUIVALENT = 8.0
#: Standard errors that a ratio must be away from 1 to be none by chance; one in 5e8 is.
_DEVIATIONS = 6.0
#: Of ||a - b||² that a ratio must account for where what it leaves is within the bound of noise.
_MOST_OF_IT = 0.5
#: What accumulates in float32 may be off by a few of its roundings, all to one side.
_NEAREST = 8 * torch.finfo(torch.float32).eps
_FEWEST_GRADIENTS = 8
#: |c - 1| below which a ratio is written with other decimals.
_NEAR, _VERY_NEAR = 0.05, 5e-3
#: From the median distance to the standard deviation, and to the standard error of a median, of normal numbers.
_SPREAD_OF_MEDIAN = 1.4826 * 1.2533


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonScale:
    """The ratio of all main gradients of an update: their median, its standard error, and how many they are."""

    ratio: float
    error: float
    num_tensors: int


def find_common_scale(differences: Sequence[TensorDifference], *, step: int, update: int) -> CommonScale | None:
    """The ratio that the main gradients of an update have in common; ``None`` where it is 1, or they are few."""
    gradients = [
        item for item in differences if (item.key.step, item.key.update, item.key.kind) == (step, update, "gradient")
    ]
    slopes = [item.slope for item in gradients if item.slope is not None and item.size]
    if len(slopes) < _FEWEST_GRADIENTS:
        return None
    ratio = median(slopes)
    error = _SPREAD_OF_MEDIAN * median(abs(slope - ratio) for slope in slopes) / math.sqrt(len(slopes))
    return CommonScale(ratio=ratio, error=error, num_tensors=len(slopes)) if _is_apart(ratio, error) else None


def find_ratio(
    pair: FlatPair, layout: Mapping[str, float], *, bound: float, common: CommonScale | None = None
) -> Residual | None:
    """b is c times a; c is 0 or -1 where it is zero, or of the other sign.

    layout: numbers that c may be. bound: of ||a - b|| / ||a||, of noise. common: of the gradients made from the tensor.
    """
    size = square_of(pair.baseline)
    if size == 0.0:
        return _residual("zeroed", 0.0, 1.0, "baseline is zero, candidate is not")
    ratio = float(torch.dot(pair.baseline, pair.candidate)) / size
    remainder = torch.sub(pair.candidate, pair.baseline, alpha=ratio)
    explained = pair.explained(remainder)
    if abs(ratio) <= max(pair.rounding, 1e-6):
        return _residual("zeroed", 0.0, explained, "candidate is zero, baseline is not")
    is_weak = pair.is_small or _equivalent_elements(pair.baseline * pair.difference) < _FEWEST_EQUIVALENT
    closeness = VERY_CLOSE if is_weak else CLOSE
    if abs(ratio + 1.0) <= closeness:
        return _residual("sign", -1.0, explained, "candidate is the baseline with its sign reversed")
    name = name_factor(ratio, layout, closeness=closeness) if ratio > 0 else None
    error = square_of(pair.baseline * remainder) ** 0.5 / size
    if is_weak and name is None:
        return _find_common(pair, common, own=ratio, error=error)
    named = f": {name}" if name else ""
    is_certain = _is_apart(ratio, error) and not _is_lopsided(pair)
    if _is_slight(pair):
        is_certain &= not _is_cut_off(pair, remainder)
        if not is_certain:
            return _find_common(pair, common, own=ratio, error=error)
    if explained >= ENOUGH:
        text = f"candidate is {format_ratio(ratio, error)} times the baseline{named}"
        return _residual("ratio", ratio, explained, text)
    found = _find_within_noise(pair, remainder, explained, bound=bound)
    if found and is_certain:
        share, what = found
        text = f"candidate is {format_ratio(ratio, error)} times the baseline but for {what}{named}"
        return Residual(kind="ratio", value=ratio, explained=share, text=text)
    return _find_common(pair, common, own=ratio, error=error)


def format_ratio(ratio: float, error: float = 0.0) -> str:
    """With three decimals, or seven very near to 1.

    Near to 1 only those that its standard error leaves, of which two are half of the last decimal, or that tell it from
    1.
    """
    if abs(ratio - 1.0) < _NEAR:
        most = 7 if abs(ratio - 1.0) < _VERY_NEAR else 3
        decimals = most if error <= 0.0 else min(max(math.floor(-math.log10(4.0 * error)), 1), most)
        while decimals < most and float(f"{ratio:.{decimals}f}") == 1.0:
            decimals += 1
        return f"{ratio:.{decimals}f}"
    return f"{ratio:.3f}" if abs(ratio) >= 0.1 else f"{ratio:.4g}"


def _is_apart(ratio: float, error: float) -> bool:
    """Whether a ratio is not 1."""
    return abs(ratio - 1.0) > max(_DEVIATIONS * error, _NEAREST)


def _is_slight(pair: FlatPair) -> bool:
    """Whether all of the difference is no larger than rounding may be."""
    return pair.square <= pair.rounding**2 * square_of(pair.baseline)


def _is_lopsided(pair: FlatPair) -> bool:
    """Whether few elements make up the tensor, through which any ratio fits."""
    return _equivalent_elements(pair.baseline.square()) < _FEWEST_EQUIVALENT


def _is_cut_off(pair: FlatPair, remainder: torch.Tensor) -> bool:
    """Whether steps of the dtype's numbers, all to one side, explain as much: digits that are cut off, not rounded."""
    exponents = torch.frexp(pair.baseline).exponent
    steps = torch.ldexp(pair.baseline.sign(), exponents - 1).mul_(pair.eps)
    size = square_of(steps)
    count = float(torch.dot(steps, pair.difference)) / size if size else 0.0
    return square_of(torch.sub(pair.difference, steps, alpha=count)) <= square_of(remainder)


def _find_within_noise(
    pair: FlatPair, remainder: torch.Tensor, explained: float, *, bound: float
) -> tuple[float, str] | None:
    """How much a ratio and noise account for together, and which noise; ``None`` where that is not enough."""
    share = pair.explained(_beyond_rounding(pair, remainder))
    if share >= ENOUGH:
        return share, "rounding"
    is_within = square_of(remainder) <= bound**2 * square_of(pair.baseline)
    return (1.0, "noise") if is_within and explained >= _MOST_OF_IT else None


def _beyond_rounding(pair: FlatPair, remainder: torch.Tensor) -> torch.Tensor:
    """The remainder, 0 where it is what rounding both sides to the dtype leaves."""
    largest = torch.maximum(pair.baseline.abs(), pair.candidate.abs())
    return remainder.where(remainder.abs() > pair.eps * largest, 0.0)


def _find_common(pair: FlatPair, common: CommonScale | None, *, own: float, error: float) -> Residual | None:
    """The ratio of the gradients, where the tensor's own is that within its error, and the rest of it is rounding."""
    if common is None or abs(own - common.ratio) > _DEVIATIONS * math.hypot(error, common.error):
        return None
    remainder = torch.sub(pair.candidate, pair.baseline, alpha=common.ratio)
    text = (
        f"candidate is {format_ratio(common.ratio, common.error)} times the baseline but for rounding, as the "
        f"median of the {common.num_tensors} gradients of the update is"
    )
    return _residual("ratio", common.ratio, pair.explained(_beyond_rounding(pair, remainder)), text)


def _residual(kind: ResidualKind, value: float, explained: float, text: str) -> Residual | None:
    return Residual(kind=kind, value=value, explained=explained, text=text) if explained >= ENOUGH else None


def _equivalent_elements(products: torch.Tensor) -> float:
    """Of how many equal elements a sum of these consists: (Σ|p|)² / Σp²."""
    square = square_of(products)
    return float(products.abs().sum()) ** 2 / square if square else 0.0
