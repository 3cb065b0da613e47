"""Whether a candidate is a multiple of its baseline, from the rest when the best multiple is taken away.

A ratio c is recognised where it accounts for 90 % of ||a - b||². So near to 1 that noise hides it, this fixed part is
no measure. Then c is recognised where its rest is all noise, and c is further from 1 than its own uncertainty allows.
The rest is noise where it is rounding at nearly every element, at most the spacing of the dtype's numbers there, since
both sides were rounded by half of it; or where it is within the bound of the tensor, and c accounts for half of the
difference. Digits cut off make a tensor smaller too, by steps of its numbers' spacing rather than by a ratio: the one
with the smaller rest is the explanation. The standard error of c = <a, b> / <a, a>, with a remainder r growing with a,
is √Σa²r² / Σa² (White, Econometrica 48, 1980). If a ratio is still too near to 1, the gradients made from the same
tensor may tell it: sums over all tokens, in float32, in which rounding is averaged away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from typing import Literal

import torch

from mock_scheduler.comparison.measure.large_tensors import FlatPair, square_of
from mock_scheduler.comparison.residuals import Multiple, Residual, Zero
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.comparison.thresholds import (
    CLOSE,
    DEVIATION_OF_MAD,
    ENOUGH,
    ERROR_OF_MEDIAN,
    FEWEST_EQUIVALENT,
    FEWEST_SLOPES,
    MOST_OF_IT,
    NO_RATIO,
    PARALLEL,
    RATIO_DEVIATIONS,
    RATIO_ROUNDINGS,
    TIE,
    VERY_CLOSE,
)

#: What accumulates in float32 may be off by this much, all to one side.
_NEAREST = RATIO_ROUNDINGS * torch.finfo(torch.float32).eps


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonScale:
    """The ratio of all main gradients of an update: their median, its standard error, and how many they are."""

    ratio: float
    error: float
    num_tensors: int


def find_common_scale(differences: Sequence[TensorDifference], *, step: int, update: int) -> CommonScale | None:
    """Finds the ratio common to the main gradients of an update; ``None`` where it is 1, or they are few."""
    gradients = [
        item for item in differences if (item.key.step, item.key.update, item.key.kind) == (step, update, "gradient")
    ]
    slopes = [item.slope for item in gradients if item.slope is not None and item.size]
    # The error of a median over few numbers is not known well enough to say that it is not 1.
    if len(slopes) < FEWEST_SLOPES:
        return None
    # A median, since a few gradients that are wrong by themselves must not move it.
    ratio = median(slopes)
    error = DEVIATION_OF_MAD * ERROR_OF_MEDIAN * median(abs(slope - ratio) for slope in slopes) / math.sqrt(len(slopes))
    return CommonScale(ratio=ratio, error=error, num_tensors=len(slopes)) if _is_apart(ratio, error) else None


def find_ratio(
    pair: FlatPair, layout: Mapping[str, float], *, bound: float, common: CommonScale | None = None
) -> Residual | None:
    """Finds c with b equal to c times a; 0 or -1 where it is zero, or of the other sign.

    Args:
        pair: Both sides.
        layout: Numbers c may be.
        bound: Of ||a - b|| / ||a||, of noise.
        common: Of the gradients made from the tensor.
    """
    size = square_of(pair.baseline)
    # No multiple of 0 is anything else.
    if size == 0.0:
        return Residual(kind="zeroed", value=0.0, explained=1.0, detail=Zero(side="baseline"))
    # Least squares: of all multiples of a, this one leaves the smallest ||b - c·a||.
    ratio = float(torch.dot(pair.baseline, pair.candidate)) / size
    remainder = torch.sub(pair.candidate, pair.baseline, alpha=ratio)
    explained = pair.explained(remainder)
    # A multiple this near to 0 is 0 and rounding.
    if abs(ratio) <= max(pair.rounding, NO_RATIO):
        return only_enough(Residual(kind="zeroed", value=0.0, explained=explained, detail=Zero(side="candidate")))
    # Of a / (b - a) only the products weigh: one large element makes any ratio fit.
    is_weak = pair.is_small or _equivalent_elements(pair.baseline * pair.difference) < FEWEST_EQUIVALENT
    closeness = VERY_CLOSE if is_weak else CLOSE
    # A sign is named before a ratio of -1, which is the same and says less.
    if abs(ratio + 1.0) <= closeness:
        return only_enough(Residual(kind="sign", value=-1.0, explained=explained))
    factor = name_factor(ratio, layout, closeness=closeness) if ratio > 0 else None
    # White's error rather than the classical one: the remainder grows with a, as rounding does.
    error = square_of(pair.baseline * remainder) ** 0.5 / size
    # Few elements prove a ratio only where it is a number somebody could have multiplied by.
    if is_weak and factor is None:
        return _find_common(pair, common, own=ratio, error=error)
    is_certain = _is_apart(ratio, error) and not _is_lopsided(pair)
    if _is_slight(pair):
        # Rounding has no sign; digits cut off have one, as a ratio has.
        is_certain &= not _is_cut_off(pair, remainder)
        if not is_certain:
            return _find_common(pair, common, own=ratio, error=error)
    multiple = Multiple(error=error, factor=factor)
    if explained >= ENOUGH and not is_parallel(ratio, size, remainder):
        return None
    if explained >= ENOUGH:
        return Residual(kind="ratio", value=ratio, explained=explained, detail=multiple)
    found = _find_within_noise(pair, remainder, explained, bound=bound)
    if found and is_certain:
        share, rest = found
        return Residual(kind="ratio", value=ratio, explained=share, detail=replace(multiple, rest=rest))
    return _find_common(pair, common, own=ratio, error=error)


def is_parallel(ratio: float, size: float, remainder: torch.Tensor) -> bool:
    """Whether the candidate has the baseline's direction; ``size``: ||a||², the remainder stands upright on it."""
    # ||b||² is the square along a and that of the remainder, so their quotient is the cosine's square.
    along = ratio * ratio * size
    return along >= PARALLEL**2 * (along + square_of(remainder))


def _is_apart(ratio: float, error: float) -> bool:
    """Whether a ratio is not 1."""
    return abs(ratio - 1.0) > max(RATIO_DEVIATIONS * error, _NEAREST)


def _is_slight(pair: FlatPair) -> bool:
    """Whether the whole difference is no larger than rounding may be."""
    return pair.square <= pair.rounding**2 * square_of(pair.baseline)


def _is_lopsided(pair: FlatPair) -> bool:
    """Whether few elements make up the tensor, through which any ratio fits."""
    return _equivalent_elements(pair.baseline.square()) < FEWEST_EQUIVALENT


def _is_cut_off(pair: FlatPair, remainder: torch.Tensor) -> bool:
    """Whether steps of the dtype's numbers, all to one side, explain as much: digits cut off, not rounded."""
    exponents = torch.frexp(pair.baseline).exponent
    # One spacing at each element, with its sign: digits cut off all go towards 0.
    steps = torch.ldexp(pair.baseline.sign(), exponents - 1).mul_(pair.eps)
    size = square_of(steps)
    count = float(torch.dot(steps, pair.difference)) / size if size else 0.0
    return square_of(torch.sub(pair.difference, steps, alpha=count)) <= square_of(remainder)


def _find_within_noise(
    pair: FlatPair, remainder: torch.Tensor, explained: float, *, bound: float
) -> tuple[float, Literal["rounding", "noise"]] | None:
    """Returns how much a ratio and noise account for together, and which noise; ``None`` where not enough."""
    share = pair.explained(_beyond_rounding(pair, remainder))
    if share >= ENOUGH:
        return share, "rounding"
    # Beside noise the ratio need not leave nothing, but no more than noise alone does.
    is_within = square_of(remainder) <= bound**2 * square_of(pair.baseline)
    return (1.0, "noise") if is_within and explained >= MOST_OF_IT else None


def _beyond_rounding(pair: FlatPair, remainder: torch.Tensor) -> torch.Tensor:
    """Returns the remainder, 0 where rounding both sides to the dtype leaves it."""
    # The spacing at the larger of both is at least that at either.
    largest = torch.maximum(pair.baseline.abs(), pair.candidate.abs())
    return remainder.where(remainder.abs() > pair.eps * largest, 0.0)


def _find_common(pair: FlatPair, common: CommonScale | None, *, own: float, error: float) -> Residual | None:
    """Returns the ratio of the gradients, where the tensor's own is the same within its error, and the rest is
    rounding.
    """
    # Both ratios are estimates, so that their errors add as squares.
    if common is None or abs(own - common.ratio) > RATIO_DEVIATIONS * math.hypot(error, common.error):
        return None
    remainder = torch.sub(pair.candidate, pair.baseline, alpha=common.ratio)
    detail = Multiple(error=common.error, rest="rounding", num_gradients=common.num_tensors)
    explained = pair.explained(_beyond_rounding(pair, remainder))
    return only_enough(Residual(kind="ratio", value=common.ratio, explained=explained, detail=detail))


def only_enough(residual: Residual) -> Residual | None:
    """Returns an explanation of most of the difference; ``None`` for any other."""
    return residual if residual.explained >= ENOUGH else None


def _equivalent_elements(products: torch.Tensor) -> float:
    """Returns how many equal elements a sum of these is worth: (Σ|p|)² / Σp²."""
    square = square_of(products)
    return float(products.abs().sum()) ** 2 / square if square else 0.0


def name_factor(value: float, layout: Mapping[str, float], *, closeness: float = CLOSE) -> str | None:
    """Names the simplest numbers of the layout equal to ``value``: ``tp or 1/dp``; ``None`` for none.

    ``layout``: numbers by name, as ``{"tp": 2, "micro-batches": 4}``. Tried in this order, the nearest first within
    each: the numbers and their inverses; their square roots; products and quotients of two.
    """
    known = {name: float(number) for name, number in layout.items() if number > 0 and number != 1}
    # A loss or a gradient may be scaled by √n where variances are averaged over n.
    roots = {f"√{name}": math.sqrt(number) for name, number in known.items()}
    # The root of 4 rows is 2, as nearly every mistake by a factor is.
    roots = {name: root for name, root in roots.items() if not root.is_integer()}
    for candidates in (_with_inverses(known), _with_inverses(roots), _products(known)):
        errors = {name: abs(value / number - 1.0) for name, number in candidates.items()}
        # Simple numbers first: a product of two fits nearly anything.
        nearest = min(errors.values(), default=math.inf)
        if nearest <= closeness:
            return " or ".join(name for name, error in errors.items() if error <= nearest + TIE)
    return None


def _with_inverses(numbers: Mapping[str, float]) -> dict[str, float]:
    return {**numbers, **{f"1/{name}": 1.0 / number for name, number in numbers.items()}}


def _products(numbers: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for (left, mine), (right, other) in combinations(numbers.items(), 2):
        # Averaged twice, or over the product of two groups, as dp and micro-batches are.
        found[f"{left} × {right}"] = mine * other
        found[f"1/({left} × {right})"] = 1.0 / (mine * other)
        found[f"{left}/{right}"] = mine / other
        found[f"{right}/{left}"] = other / mine
    return {name: number for name, number in found.items() if number != 1.0}
