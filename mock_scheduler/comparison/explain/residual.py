"""What a difference looks like: a ratio, a missing part, a permutation, a stale tensor; nothing where it is noise.

Contract: an explanation accounts for at least 90 % of ||a - b||², a ratio together with the noise ``ratios`` describes.
Random noise has none: a fitted number needs at least 16 elements, none outweighing the others, or must be a number of
the layout. A difference no larger than the rounding of the dtype is only held against zeros and ratios, which rounding
does not make. From a tensor of more than 1 Mi elements, evenly spaced ones are taken, and ``Residual.sample`` says so.
Cheap explanations are tried first; a is the baseline, b the candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

import torch

from mock_scheduler.comparison.explain.moves import find_move
from mock_scheduler.comparison.explain.narrowing import find_narrowing
from mock_scheduler.comparison.explain.permutations import Holders
from mock_scheduler.comparison.explain.ratios import CommonScale, find_ratio, only_enough
from mock_scheduler.comparison.measure.figures import compute_figures
from mock_scheduler.comparison.measure.large_tensors import FlatPair, flatten, spread, square_of
from mock_scheduler.comparison.residuals import (
    ElementBlock,
    Narrowed,
    OneElement,
    PartialSums,
    Residual,
    ResidualKind,
    Side,
)
from mock_scheduler.comparison.tensors import Figures
from mock_scheduler.comparison.thresholds import (
    ENOUGH,
    EXPLAINED_ROUNDING_UNITS,
    FEWEST_ELEMENTS,
    LARGEST_DECAY,
    LEFT_OVER,
    MOST_OF_IT,
    MOST_PARTS,
    OUTLIER_SHARE,
    VERY_CLOSE,
)
from mock_scheduler.trace.entries import DimName


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
    holders: Mapping[int, Holders] | None = None,
    bound: float = 0.0,
    common: CommonScale | None = None,
    start: torch.Tensor | None = None,
) -> Residual | None:
    """Explains ``candidate`` in terms of ``baseline``; ``None`` where nothing explains most of the difference.

    Args:
        baseline, candidate: Finite, of one shape and dtype.
        present: bool, as of ``compute_figures``; elements that count.
        layout: Numbers a ratio may be, as ``{"tp": 2, "micro-batches": 4}``.
        previous: The baseline's tensor of the update before.
        parts: Contributions of ranks to the sum, each of the same shape.
        part_names: Their names; without them they are numbered.
        dims: What each dimension counts.
        holders: By dimension, what the candidate's ranks hold.
        bound: Of ||a - b|| / ||a||, of noise.
        common: The ratio of the gradients of the update.
        start: Where both sides are changes by an update, the baseline's parameter before it.
    """
    figures = compute_figures(baseline, candidate, present=present)
    # Integers have no rounding, so that any difference of them may be explained.
    rounding = torch.finfo(baseline.dtype).eps * EXPLAINED_ROUNDING_UNITS if baseline.is_floating_point() else 0.0
    special = _find_one_element(figures, rounding=rounding) or _find_narrowed(baseline, candidate, present, figures)
    if special is not None or not 0.0 < figures.norm < math.inf:
        return special
    pair = flatten(baseline, candidate, present, figures, rounding=rounding)
    sample = [spread(item.expand(baseline.shape), pair.stride, pair.present) for item in parts]
    before, decayed = (None if item is None else spread(item, pair.stride, pair.present) for item in (previous, start))
    # Beside rounding, other explanations fit what is only rounded.
    is_slight = not rounding < figures.relative
    ratio_of = partial(find_ratio, pair, bound=bound, common=common)
    tests: tuple[Callable[[], Residual | None], ...] = (
        # The most particular explanation first: a stale tensor is in part a ratio, and a ratio in part a constant.
        lambda: _find_stale(pair, before),
        lambda: _find_left_over(pair, before, least=ENOUGH, below=ENOUGH),
        lambda: _find_decay(pair, decayed),
        lambda: _best(ratio_of(layout or {}), _find_parts(pair, sample, part_names)),
        lambda: _find_constant(pair),
        lambda: _find_block(pair),
        # Of a shard: ranks keep the sum of their own one there, and their own part of the others'.
        lambda: _find_left_over(pair, before, least=LEFT_OVER, below=MOST_OF_IT),
    )
    for test in (lambda: _find_zeros(pair), lambda: ratio_of({})) if is_slight else tests:
        if (found := test()) is not None:
            return replace(found, sample=pair.sample)
    if is_slight or figures.num_elements < FEWEST_ELEMENTS:
        return None
    # Orders are tried last, since they cost a pass over the tensor each.
    return find_move(
        baseline, candidate, present=present, degrees=_whole(layout), dims=dims, enough=ENOUGH, holders=holders
    )


def _whole(layout: Mapping[str, float] | None) -> list[int]:
    return [int(number) for number in (layout or {}).values() if float(number).is_integer()]


def _find_narrowed(
    baseline: torch.Tensor, candidate: torch.Tensor, present: torch.Tensor | None, figures: Figures
) -> Residual | None:
    """Finds that rounding to fewer bits of mantissa makes a difference of this size."""
    found = find_narrowing(baseline, candidate) if present is None and figures.norm else None
    # A larger difference has another cause, whatever its type.
    if found is None or not figures.relative <= 2.0 ** -found[0]:
        return None
    return Residual(kind="narrowed", value=float(found[0]), explained=1.0, detail=Narrowed(num_bits=found[1]))


def _best(*found: Residual | None) -> Residual | None:
    return max((item for item in found if item is not None), key=lambda item: item.explained, default=None)


def _find_one_element(figures: Figures, *, rounding: float) -> Residual | None:
    """Finds one unequal element, or one so far off that it outweighs all others."""
    worst = figures.worst
    if worst is None or figures.num_elements < 2:
        return None
    share = (figures.max_abs / figures.norm) ** 2 if 0.0 < figures.norm < math.inf else 0.0
    if figures.num_different == 1:
        share = 1.0
    elif figures.num_elements < FEWEST_ELEMENTS or figures.max_abs < OUTLIER_SHARE * abs(worst.baseline):
        return None
    # Another order of sums moves small elements as far as mean ones. Where rounding to the dtype undoes that at most
    # elements, few differ, and one of them outweighs the others by chance.
    is_rounding = figures.relative * math.sqrt(figures.num_elements) <= rounding
    if is_rounding and figures.num_different > 1:
        return None
    offset = worst.candidate - worst.baseline
    one = OneElement(num_elements=figures.num_elements, num_different=figures.num_different)
    return only_enough(Residual(kind="one element", value=offset, explained=share, detail=one))


def _find_stale(pair: FlatPair, previous: torch.Tensor | None) -> Residual | None:
    if previous is None:
        return None
    remainder = pair.candidate - previous
    # Of few elements, the tensor before is told from noise only where it is met to the rounding.
    if pair.is_small and square_of(remainder) > pair.rounding**2 * square_of(previous):
        return None
    return only_enough(Residual(kind="stale", value=1.0, explained=pair.explained(remainder)))


def _find_left_over(pair: FlatPair, previous: torch.Tensor | None, *, least: float, below: float) -> Residual | None:
    """Finds that the candidate is the baseline and a multiple of the tensor of the update before.

    ``least``: the share of the difference that this explains; ``below``: that a multiple of the baseline does not.
    """
    found = None if previous is None else _fit(pair, previous, "left over")
    if found is None or found.explained < least:
        return None
    # Where one update is like the next, both fit, and a ratio says less.
    size = square_of(pair.baseline)
    ratio = float(torch.dot(pair.baseline, pair.difference)) / size if size else 0.0
    return found if pair.explained(torch.sub(pair.difference, pair.baseline, alpha=ratio)) < below else None


def _find_decay(pair: FlatPair, start: torch.Tensor | None) -> Residual | None:
    """Finds that the changes differ by a multiple of the parameter itself."""
    found = None if start is None else _fit(pair, start, "decay")
    is_fit = found is not None and found.explained >= ENOUGH and abs(found.value) <= LARGEST_DECAY
    return found if is_fit else None


def _fit(pair: FlatPair, other: torch.Tensor, kind: ResidualKind) -> Residual | None:
    """Fits the difference as a multiple of another tensor."""
    # Least squares of b - a by one tensor t: <t, b - a> / <t, t>.
    size = square_of(other)
    if pair.is_small or size == 0.0:
        return None
    multiple = float(torch.dot(other, pair.difference)) / size
    explained = pair.explained(torch.sub(pair.difference, other, alpha=multiple))
    return Residual(kind=kind, value=multiple, explained=explained)


def _find_parts(pair: FlatPair, parts: Sequence[torch.Tensor], names: Sequence[str]) -> Residual | None:
    """Explains the difference as the sum of some of the parts, with either sign."""
    # A single part is the whole sum, which a ratio explains.
    if len(parts) < 2 or pair.is_small or pair.square == 0.0:
        return None
    stacked = torch.stack(list(parts))
    # ||d ∓ Σp||² from products alone, so that 256 subsets cost no pass over the elements.
    gram = (stacked @ stacked.T).tolist()
    along = (stacked @ pair.difference).tolist()
    sizes = range(1, len(parts) if len(parts) <= MOST_PARTS else 3)
    best: tuple[float, int, tuple[int, ...]] = (0.0, 1, ())
    for subset in (chosen for size in sizes for chosen in combinations(range(len(parts)), size)):
        size = sum(gram[left][right] for left in subset for right in subset)
        product = sum(along[part] for part in subset)
        sign = 1 if product > 0 else -1
        best = max(best, ((2 * sign * product - size) / pair.square, sign, subset))
    explained, sign, subset = best
    sums = PartialSums(
        parts=tuple(names[part] if names else str(part) for part in subset), num_parts=None if names else len(parts)
    )
    kind: ResidualKind = "doubled part" if sign > 0 else "missing part"
    return only_enough(Residual(kind=kind, value=float(sign), explained=explained, detail=sums))


def _find_constant(pair: FlatPair) -> Residual | None:
    count = pair.difference.numel() if pair.present is None else int(torch.count_nonzero(pair.present))
    if count < FEWEST_ELEMENTS:
        return None
    offset = float(pair.difference.sum()) / count
    # The mean difference is the constant that leaves least.
    constant = torch.full_like(pair.difference, offset)
    if pair.present is not None:
        constant = constant.where(pair.present, 0.0)
    explained = pair.explained(pair.difference - constant)
    return only_enough(Residual(kind="constant", value=offset, explained=explained))


#: Multiples of the baseline that a part of a tensor is looked at for: added twice, subtracted, averaged over two.
_BLOCKS: tuple[tuple[ResidualKind, float], ...] = (("doubled part", 2.0), ("sign", -1.0), ("ratio", 0.5))


def _find_block(pair: FlatPair) -> Residual | None:
    """Finds b to be 0, twice a, -a or half of a in a part of the tensor, and nearly a elsewhere; or only a to be 0
    there.
    """
    if pair.is_small:
        return None
    size = pair.baseline.abs()
    # Zeros are exact, so that they are told from noise in the fewest elements.
    zeros = _find_zeros(pair)
    if zeros is not None:
        return zeros
    for kind, ratio in _BLOCKS:
        closeness = max(VERY_CLOSE, pair.rounding)
        remainder = torch.sub(pair.candidate, pair.baseline, alpha=ratio)
        inside = (remainder.abs() <= closeness * size) & (size > 0)
        found = _find_part(pair, inside, remainder, kind=kind, value=ratio)
        if found is not None:
            return found
    inside = (size == 0) & (pair.candidate != 0)
    return _find_part(pair, inside, torch.zeros_like(size), kind="zeroed", value=0.0, zero_side="baseline")


def _find_zeros(pair: FlatPair) -> Residual | None:
    """Finds b to be 0 in a part of the tensor."""
    if pair.is_small:
        return None
    inside = (pair.candidate == 0) & (pair.baseline != 0)
    return _find_part(pair, inside, pair.candidate, kind="zeroed", value=0.0, zero_side="candidate")


def _find_part(
    pair: FlatPair,
    inside: torch.Tensor,
    remainder: torch.Tensor,
    *,
    kind: ResidualKind,
    value: float,
    zero_side: Side | None = None,
) -> Residual | None:
    """Explains the difference by the values of some elements; ``remainder``: the rest of it there."""
    count = int(torch.count_nonzero(inside))
    # One element has its own explanation.
    if count < 2:
        return None
    explained = pair.explained(torch.where(inside, remainder, pair.difference))
    block = ElementBlock(num_inside=count, num_elements=inside.numel(), zero_side=zero_side)
    return only_enough(Residual(kind=kind, value=value, explained=explained, detail=block))
