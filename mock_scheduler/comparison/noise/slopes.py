"""Whether a difference is a change of size: the slope <a, b> / <a, a> of tensors, by update and one by one.

A relative norm hides a scale error smaller than the noise, since the two add as squares. The slope of a tensor s has
far less noise. *All gradients of an update*: with m the median of s - 1 and z = m / (1.4826 · MAD / √n), an error of
scale is where |z| > 5. Slopes of one update are not independent (they all follow the loss), so z alone fires on honest
runs (measured: up to 21, and up to 15 among perturbed runs). So |m| must also be more than 3 times the largest |m| of
the perturbed runs, and |z| larger than theirs. *One tensor*: |s - 1| > 5 standard deviations of its slope among the
perturbed runs. Five runs give it only roughly, so it is taken as no smaller than usual for the tensor's noise: the
median over the tensors of its kind and update of (deviation by noise), times its own noise. Honest layouts then stay
below 3.1, in float32 and bfloat16.

Scale errors in a backward pass behind a forward pass equal to the last bit.

Perturbed weights reach gradients through their forward pass. Where a candidate's is equal, their noise is no measure of
its gradients: these differ by the roundings of the backward pass alone, without a common sign, and an error of scale
hidden by the noise of perturbed runs (0.3 % in bfloat16) stands out. *All gradients of an update*: with m the median of
s - 1 and z = m / (1.4826 · MAD / √n), as in ``slopes``, an error of scale is where |z| > 5. *One tensor*: where 90 % of
||a - b||² is (s - 1) · a, which rounding in 16 or more elements is not by chance. Both are at least 4 roundings of
accumulation, since one number all gradients are multiplied by may be rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.explain.ratios import name_factor
from mock_scheduler.comparison.noise.suspicions import ScaledGradients, ScaledTensor, Suspicion, TestSummary
from mock_scheduler.comparison.tensors import SLOPE_KINDS, TensorDifference
from mock_scheduler.comparison.thresholds import (
    CALIBRATED_RUNS,
    DEVIATION_OF_MAD,
    ENOUGH,
    FEWEST_ELEMENTS,
    FEWEST_SLOPES,
    LARGEST_Z,
    SAFETY,
)
from mock_scheduler.trace.entries import PHASES, Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class SlopeSummary:
    """Holds the gradients of one update.

    Args:
        step: Global step.
        update: Within the step.
        num_tensors: Gradients with a slope.
        median: m of the candidate.
        z: Its robust z.
        spread: 1.4826 · MAD / √n.
        noise_medians: m of each perturbed run.
        noise_z: Their largest |z|.
        limit: Of |m|.
    """

    step: int
    update: int
    num_tensors: int
    median: float
    z: float
    spread: float
    noise_medians: tuple[float, ...]
    noise_z: float
    limit: float

    @property
    def is_scaled(self) -> bool:
        """Whether all gradients together are larger or smaller than noise makes them."""
        return abs(self.median) > self.limit and abs(self.z) > self.noise_z


def robust_z(deviations: Sequence[float]) -> tuple[float, float, float]:
    """Returns median m, spread 1.4826 · MAD / √n and z = m / spread of s - 1; z is 0 where m is, infinite without
    spread.
    """
    middle = median(deviations)
    # Median and MAD: a few gradients that are wrong by themselves must not hide that all are scaled.
    spread = DEVIATION_OF_MAD * median(abs(item - middle) for item in deviations) / math.sqrt(len(deviations))
    if not middle:
        return 0.0, spread, 0.0
    return middle, spread, middle / spread if spread else math.copysign(math.inf, middle)


def summarise_slopes(differences: Sequence[TensorDifference], noise: NoiseBounds) -> list[SlopeSummary]:
    """Summarises each update with judged gradients, in order; none with fewer than 8 gradients."""
    groups: dict[tuple[int, int], list[TensorDifference]] = {}
    for item in differences:
        if item.key.kind == "gradient" and _has_slope(item, noise):
            groups.setdefault((item.key.step, item.key.update), []).append(item)
    return [_summarise(place, items, noise) for place, items in groups.items() if len(items) >= FEWEST_SLOPES]


def judge_slopes(
    differences: Sequence[TensorDifference], noise: NoiseBounds, *, numbers: Mapping[str, float]
) -> tuple[list[Suspicion], TestSummary]:
    """Finds tensors of another scale, and sums up the test.

    ``numbers``: of the layouts, by which a ratio may be named.
    """
    summaries = summarise_slopes(differences, noise)
    scaled = {(item.step, item.update) for item in summaries if item.is_scaled}
    found = [_suspect_all(item, numbers) for item in summaries if item.is_scaled]
    kinds: dict[tuple[int, int, str], list[TensorDifference]] = {}
    for difference in differences:
        if difference.key.kind in SLOPE_KINDS and _has_slope(difference, noise):
            key = difference.key
            kinds.setdefault((key.step, key.update, key.kind), []).append(difference)
    num_tensors = sum(map(len, kinds.values()))
    smallest = math.inf
    for (step, update, kind), items in kinds.items():
        deviations = _deviations(items, noise)
        # About 1 and not about the runs' mean: the baseline itself is the reference.
        limits = [LARGEST_Z * deviation * _few_runs(noise.num_runs) for deviation in deviations]
        smallest = min(smallest, median(limits))
        # All of them together were told of already.
        if kind == "gradient" and (step, update) in scaled:
            continue
        pairs = zip(items, limits, strict=True)
        alone = [(item, limit) for item, limit in pairs if abs(slope_of(item) - 1.0) > limit]
        if alone:
            found += suspect_scale([item for item, _ in alone], numbers, limit=alone[0][1])
    together = min((item.limit for item in summaries), default=None)
    alone_limit = smallest if num_tensors else None
    return found, TestSummary(test="slope", num_looked_at=num_tensors, together=together, alone=alone_limit)


def _has_slope(item: TensorDifference, noise: NoiseBounds) -> bool:
    measured = noise.tensors.get(item.key)
    return (
        measured is not None
        and bool(measured.slopes)
        and item.slope is not None
        and math.isfinite(item.slope)
        and all(map(math.isfinite, (*measured.slopes, *measured.relative)))
        and item.is_judged
        # A tensor beyond its bound is a divergence, and no suspicion.
        and not item.exceeds
    )


def slope_of(item: TensorDifference) -> float:
    """Returns the slope of a tensor known to have one."""
    assert item.slope is not None
    return item.slope


def _summarise(place: tuple[int, int], items: Sequence[TensorDifference], noise: NoiseBounds) -> SlopeSummary:
    # Of s - 1, so that 0 means an equal scale.
    middle, spread, z = robust_z([slope_of(item) - 1.0 for item in items])
    measured = [noise.tensors[item.key].slopes for item in items]
    # A tensor that some run lacks shortens the series for all, or runs would be mixed up.
    num_runs = min(map(len, measured))
    runs = [robust_z([slopes[run] - 1.0 for slopes in measured]) for run in range(num_runs)]
    medians = tuple(run[0] for run in runs)
    return SlopeSummary(
        step=place[0],
        update=place[1],
        num_tensors=len(items),
        median=middle,
        z=z,
        spread=spread,
        noise_medians=medians,
        # Runs without any spread have an infinite z, which says nothing.
        noise_z=max((abs(run[2]) for run in runs if math.isfinite(run[2])), default=0.0),
        limit=max(LARGEST_Z * spread, SAFETY * max(_few_runs(num_runs) * max(map(abs, medians)), noise.smallest)),
    )


def _few_runs(num_runs: int) -> float:
    """Returns the factor by which a limit grows that fewer runs than the calibrated number give."""
    # The error of a spread of n runs falls with √n.
    return math.sqrt(max(CALIBRATED_RUNS / max(num_runs, 1), 1.0))


def _deviations(items: Sequence[TensorDifference], noise: NoiseBounds) -> list[float]:
    """Returns the standard deviation of each tensor's slope about 1, no smaller than usual for its noise."""
    measured = [noise.tensors[item.key] for item in items]
    # Deviation by noise is alike for tensors of one kind, of which there are more than runs.
    shares = [each.slope_spread / each.usual for each in measured if each.usual]
    usual = median(shares) if shares else 0.0
    # So that the limit, LARGEST_Z deviations, is never below the bound of any tensor without noise.
    smallest = SAFETY * noise.smallest / LARGEST_Z
    return [max(each.slope_spread, usual * each.usual, smallest) for each in measured]


def _suspect_all(item: SlopeSummary, numbers: Mapping[str, float]) -> Suspicion:
    ratio = 1.0 + item.median
    return Suspicion(
        test="slope",
        step=item.step,
        update=item.update,
        name="",
        value=abs(item.median),
        limit=item.limit,
        fact=ScaledGradients(
            ratio=ratio,
            factor=name_factor(ratio, numbers),
            num_tensors=item.num_tensors,
            z=item.z,
            noise_z=item.noise_z,
        ),
    )


def suspect_scale(
    items: Sequence[TensorDifference],
    numbers: Mapping[str, float],
    *,
    limit: float,
    is_behind_equal_forward: bool = False,
) -> list[Suspicion]:
    """Suspects the first of some tensors of another scale, and counts the others.

    Args:
        items: Of one update, in the order of computation.
        numbers: Of the layouts, by which a ratio may be named.
        limit: Noise makes at most so much of the first one's |slope - 1|.
        is_behind_equal_forward: The forward pass before them is equal to the last bit.
    """
    if not items:
        return []
    first = items[0]
    slope = slope_of(first)
    fact = ScaledTensor(
        key=first.key,
        ratio=slope,
        factor=name_factor(slope, numbers),
        num_others=len(items) - 1,
        is_behind_equal_forward=is_behind_equal_forward,
    )
    return [
        Suspicion(
            test="slope",
            step=first.key.step,
            update=first.key.update,
            name=first.key.name,
            value=abs(slope - 1.0),
            limit=limit,
            fact=fact,
        )
    ]


def judge_behind_equal_forward(
    differences: Sequence[TensorDifference], noise: NoiseBounds, *, numbers: Mapping[str, float]
) -> list[Suspicion]:
    """Finds tensors of another scale there, in the order of computation.

    ``numbers``: of the layouts, by which a ratio may be named.
    """
    found: list[Suspicion] = []
    for items in _find_behind(differences):
        together = _judge_together(items, noise, numbers)
        # Gradients told of together need not be told of one by one.
        alone = [item for item in items if _is_scaled(item, noise) and not (together and item.key.kind == "gradient")]
        found += [together] if together else []
        found += suspect_scale(alone, numbers, limit=noise.smallest, is_behind_equal_forward=True)
    return found


def _find_behind(differences: Sequence[TensorDifference]) -> list[list[TensorDifference]]:
    """Finds tensors with a slope behind each forward pass with some compared tensors, all of them equal."""
    is_equal: dict[tuple[int, int], bool] = {}
    behind: dict[tuple[int, int], list[TensorDifference]] = {}
    for item in differences:
        key = item.key
        place = (key.step, key.update)
        if PHASES[key.kind] is Phase.FORWARD:
            # One unequal tensor of the forward pass is enough: its noise then reaches every gradient.
            is_equal[place] = is_equal.get(place, True) and item.bit_equal
        elif key.kind in SLOPE_KINDS and item.slope is not None and math.isfinite(item.slope):
            behind.setdefault(place, []).append(item)
    return [behind[place] for place, equal in is_equal.items() if equal and place in behind]


def _judge_together(
    items: Sequence[TensorDifference], noise: NoiseBounds, numbers: Mapping[str, float]
) -> Suspicion | None:
    gradients = [item for item in items if item.key.kind == "gradient" and item.size and not item.exceeds]
    if len(gradients) < FEWEST_SLOPES:
        return None
    # No run measured this: the noise of perturbed weights is not in it, so only the spread among tensors bounds it.
    middle, spread, z = robust_z([slope_of(item) - 1.0 for item in gradients])
    # Behind equal forward passes all slopes may be equal, with a spread of 0.
    limit = max(LARGEST_Z * spread, noise.smallest)
    if abs(middle) <= limit:
        return None
    key, ratio = gradients[0].key, 1.0 + middle
    return Suspicion(
        test="slope",
        step=key.step,
        update=key.update,
        name="",
        value=abs(middle),
        limit=limit,
        fact=ScaledGradients(
            ratio=ratio, factor=name_factor(ratio, numbers), num_tensors=len(gradients), z=z, noise_z=None
        ),
    )


def _is_scaled(item: TensorDifference, noise: NoiseBounds) -> bool:
    off = abs(slope_of(item) - 1.0)
    # (s - 1)² ||a||² is the part of ||a - b||² a change of size accounts for.
    is_enough = off * off >= ENOUGH * item.relative * item.relative
    return not item.exceeds and off > noise.smallest and is_enough and item.num_elements >= FEWEST_ELEMENTS
