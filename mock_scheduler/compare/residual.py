"""What a difference looks like: a ratio, a missing part, a permutation, a stale tensor; nothing where it is noise.

Contract: an explanation is given only where it accounts for at least 90 % of ||a - b||². What is no larger than the
rounding of the dtype, and what random noise could look like, has none: a fitted number needs at least 16 elements, none
of which outweighs the others, or must be a number of the layout. Of a tensor of more than 1 Mi elements, evenly spaced
ones are looked at, and the text says so. Cheap explanations are tried first; a is the baseline, b the candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from mock_scheduler.compare.differences import Figures, Residual, ResidualKind
from mock_scheduler.compare.factors import CLOSE, VERY_CLOSE, name_factor
from mock_scheduler.compare.figures import compute_figures
from mock_scheduler.compare.moves import find_move
from mock_scheduler.text import count_of
from mock_scheduler.trace.entries import DimName

#: What an explanation must account for.
ENOUGH = 0.9
_MOST_ELEMENTS = 1 << 20
_FEWEST_ELEMENTS = 16
#: Elements of equal weight that a fitted number rests on.
_FEWEST_EQUIVALENT = 8.0
_ROUNDING_UNITS = 8
#: All subsets of up to so many partial sums are tried; of more, single ones and pairs.
_MOST_PARTS = 8


def classify_residual(
    baseline: torch.Tensor,
    candidate: torch.Tensor,
    *,
    present: torch.Tensor | None = None,
    layout: Mapping[str, float] | None = None,
    previous: torch.Tensor | None = None,
    parts: Sequence[torch.Tensor] = (),
    part_names: Sequence[str] = (),
    dims: tuple[DimName, ...] = (),
) -> Residual | None:
    """What ``candidate`` is in terms of ``baseline``; ``None`` where nothing explains most of the difference.

    baseline, candidate, previous: finite, of one shape and dtype. present: bool, as of ``compute_figures``; elements
    that count. layout: numbers that a ratio may be, as ``{"tp": 2, "micro-batches": 4}``. previous: the baseline's
    tensor of the update before. parts: what ranks contribute to the sum, each of the same shape; part_names: whose
    they are, else they are numbered. dims: what each dimension counts, for the text.
    """
    figures = compute_figures(baseline, candidate, present=present)
    one = _find_one_element(figures)
    rounding = torch.finfo(baseline.dtype).eps * _ROUNDING_UNITS if baseline.is_floating_point() else 0.0
    if one is not None or not rounding < figures.relative or not math.isfinite(figures.norm):
        return one
    pair = _flatten(baseline, candidate, present, figures, rounding)
    sample = [_spread(item.expand(baseline.shape), pair.stride, pair.present) for item in parts]
    before = None if previous is None else _spread(previous, pair.stride, pair.present)
    tests: tuple[Callable[[], Residual | None], ...] = (
        lambda: _find_stale(pair, before),
        lambda: _best(_find_ratio(pair, layout or {}), _find_parts(pair, sample, part_names)),
        lambda: _find_constant(pair),
        lambda: _find_block(pair),
    )
    for test in tests:
        found = test()
        if found is not None:
            return replace(found, text=found.text + _describe_sample(pair, baseline.numel()))
    if figures.num_elements < _FEWEST_ELEMENTS:
        return None
    degrees = [int(number) for number in (layout or {}).values() if float(number).is_integer()]
    return find_move(baseline, candidate, present=present, degrees=degrees, dims=dims, enough=ENOUGH)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """Flat float64 elements, 0 in both where absent. ``stride``: between them in the tensor; ``square``: ||a - b||²."""

    baseline: torch.Tensor
    candidate: torch.Tensor
    difference: torch.Tensor
    present: torch.Tensor | None
    square: float
    stride: int
    num_elements: int
    rounding: float

    @property
    def is_small(self) -> bool:
        """Whether a fitted number would prove nothing."""
        return self.num_elements < _FEWEST_ELEMENTS

    def explained(self, remainder: torch.Tensor) -> float:
        """The part of ||a - b||² that an explanation with this remainder accounts for."""
        return 1.0 - _square(remainder) / self.square if self.square else 0.0


def _flatten(
    baseline: torch.Tensor,
    candidate: torch.Tensor,
    present: torch.Tensor | None,
    figures: Figures,
    rounding: float,
) -> _Pair:
    stride = max(math.ceil(baseline.numel() / _MOST_ELEMENTS), 1)
    stride += stride > 1 and stride % 2 == 0  # an even one would skip columns of most tensors
    mask = None if present is None else present.expand(baseline.shape).reshape(-1)[::stride]
    mine, other = (_spread(side, stride, mask) for side in (baseline, candidate))
    difference = other - mine
    return _Pair(
        baseline=mine,
        candidate=other,
        difference=difference,
        present=mask,
        square=_square(difference),
        stride=stride,
        num_elements=figures.num_elements,
        rounding=rounding,
    )


def _spread(tensor: torch.Tensor, stride: int, mask: torch.Tensor | None) -> torch.Tensor:
    values = tensor.reshape(-1)[::stride].double()
    values = values.where(values.isfinite(), 0.0)
    return values if mask is None else values.where(mask, 0.0)


def _square(values: torch.Tensor) -> float:
    return float(torch.dot(values, values))


def _describe_sample(pair: _Pair, num_elements: int) -> str:
    return f" (seen in {pair.baseline.numel():,} of {num_elements:,} elements)" if pair.stride > 1 else ""


def _best(*found: Residual | None) -> Residual | None:
    return max((item for item in found if item is not None), key=lambda item: item.explained, default=None)


def _residual(kind: ResidualKind, value: float, explained: float, text: str) -> Residual | None:
    if not explained >= ENOUGH:
        return None
    return Residual(kind=kind, value=value, explained=explained, text=text)


def _find_one_element(figures: Figures) -> Residual | None:
    """One element differs, or is so far off that it outweighs all others."""
    worst = figures.worst
    if worst is None or figures.num_elements < 2:
        return None
    share = (figures.max_abs / figures.norm) ** 2 if 0.0 < figures.norm < math.inf else 0.0
    if figures.num_different == 1:
        share = 1.0
    elif figures.num_elements < _FEWEST_ELEMENTS or figures.max_abs < 1e-2 * abs(worst.baseline):
        return None
    offset = worst.candidate - worst.baseline
    text = f"one of {figures.num_elements:,} elements differs, by {offset:.6g}"
    if figures.num_different > 1:
        text = f"one of {figures.num_elements:,} elements holds {100 * share:.1f} % of the difference: {offset:.6g}"
    return _residual("one element", offset, share, text)


def _find_stale(pair: _Pair, previous: torch.Tensor | None) -> Residual | None:
    if previous is None:
        return None
    remainder = pair.candidate - previous
    if pair.is_small and _square(remainder) > pair.rounding**2 * _square(previous):
        return None
    text = "candidate is the baseline's tensor of the update before"
    return _residual("stale", 1.0, pair.explained(remainder), text)


def _find_ratio(pair: _Pair, layout: Mapping[str, float]) -> Residual | None:
    """b is c times a; c is 0 or -1 where it is zero, or of the other sign."""
    size = _square(pair.baseline)
    if size == 0.0:
        return _residual("zeroed", 0.0, 1.0, "baseline is zero, candidate is not")
    ratio = float(torch.dot(pair.baseline, pair.candidate)) / size
    explained = pair.explained(torch.sub(pair.candidate, pair.baseline, alpha=ratio))
    if abs(ratio) <= max(pair.rounding, 1e-6):
        return _residual("zeroed", 0.0, explained, "candidate is zero, baseline is not")
    is_weak = pair.is_small or _equivalent_elements(pair.baseline * pair.difference) < _FEWEST_EQUIVALENT
    closeness = VERY_CLOSE if is_weak else CLOSE
    if abs(ratio + 1.0) <= closeness:
        return _residual("sign", -1.0, explained, "candidate is the baseline with its sign reversed")
    name = name_factor(ratio, layout, closeness=closeness) if ratio > 0 else None
    if is_weak and name is None:
        return None
    named = f": {name}" if name else ""
    return _residual("ratio", ratio, explained, f"candidate is {_format_ratio(ratio)} times the baseline{named}")


def _format_ratio(ratio: float) -> str:
    if abs(ratio - 1.0) < 5e-3:
        return f"{ratio:.7f}"
    return f"{ratio:.3f}" if abs(ratio) >= 0.1 else f"{ratio:.4g}"


def _equivalent_elements(products: torch.Tensor) -> float:
    """Of how many equal elements a sum of these consists: (Σ|p|)² / Σp²."""
    square = _square(products)
    return float(products.abs().sum()) ** 2 / square if square else 0.0


def _find_parts(pair: _Pair, parts: Sequence[torch.Tensor], names: Sequence[str]) -> Residual | None:
    """The difference is the sum of some of the parts, with either sign."""
    if len(parts) < 2 or pair.is_small or pair.square == 0.0:
        return None
    stacked = torch.stack(list(parts))
    gram = (stacked @ stacked.T).tolist()
    along = (stacked @ pair.difference).tolist()
    sizes = range(1, len(parts) if len(parts) <= _MOST_PARTS else 3)
    best: tuple[float, int, tuple[int, ...]] = (0.0, 1, ())
    for subset in (chosen for size in sizes for chosen in combinations(range(len(parts)), size)):
        size = sum(gram[left][right] for left in subset for right in subset)
        product = sum(along[part] for part in subset)
        sign = 1 if product > 0 else -1
        best = max(best, ((2 * sign * product - size) / pair.square, sign, subset))
    explained, sign, subset = best
    which = ", ".join(names[part] if names else str(part) for part in subset)
    noun, verb = ("part", "is") if len(subset) == 1 else ("parts", "are")
    text = f"the {noun} of {which} {verb}" if names else f"{noun} {which} of {len(parts)} {verb}"
    if sign > 0:
        return _residual("doubled part", 1.0, explained, f"{text} in the candidate once more")
    return _residual("missing part", -1.0, explained, f"{text} missing from the candidate")


def _find_constant(pair: _Pair) -> Residual | None:
    count = pair.difference.numel() if pair.present is None else int(torch.count_nonzero(pair.present))
    if count < _FEWEST_ELEMENTS:
        return None
    offset = float(pair.difference.sum()) / count
    constant = torch.full_like(pair.difference, offset)
    if pair.present is not None:
        constant = constant.where(pair.present, 0.0)
    text = f"candidate is the baseline {'plus' if offset > 0 else 'minus'} {abs(offset):.6g}"
    return _residual("constant", offset, pair.explained(pair.difference - constant), text)


_BLOCKS: tuple[tuple[ResidualKind, float, str], ...] = (
    ("zeroed", 0.0, "candidate is zero"),
    ("doubled part", 2.0, "candidate is twice the baseline"),
    ("sign", -1.0, "candidate is the baseline with its sign reversed"),
    ("ratio", 0.5, "candidate is half the baseline"),
)


def _find_block(pair: _Pair) -> Residual | None:
    """b is 0, twice a, -a or half of a in a part of the tensor, and nearly a elsewhere."""
    if pair.is_small:
        return None
    size = pair.baseline.abs()
    for kind, ratio, text in _BLOCKS:
        closeness = max(VERY_CLOSE, pair.rounding) if ratio else 0.0
        remainder = torch.sub(pair.candidate, pair.baseline, alpha=ratio)
        inside = (remainder.abs() <= closeness * size) & (size > 0)
        found = _describe_block(pair, inside, remainder, kind=kind, value=ratio, text=text)
        if found is not None:
            return found
    inside = (size == 0) & (pair.candidate != 0)
    text = "baseline is zero, candidate is not,"
    return _describe_block(pair, inside, torch.zeros_like(size), kind="zeroed", value=0.0, text=text)


def _describe_block(
    pair: _Pair, inside: torch.Tensor, remainder: torch.Tensor, *, kind: ResidualKind, value: float, text: str
) -> Residual | None:
    count = int(torch.count_nonzero(inside))
    if count < 2:
        return None
    explained = pair.explained(torch.where(inside, remainder, pair.difference))
    elements = count_of(count, "element")
    return _residual(kind, value, explained, f"{text} in {elements} of {inside.numel():,}")
