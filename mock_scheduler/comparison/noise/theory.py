"""Bounds from theory alone, for use where no noise was measured.

Rounding grows by a constant for each layer a value has passed: a relative error of k · C^d · ε after d layers (Theorem
5.3 of arXiv 2506.09280, which measures C = 1.03 and takes k = 4). d is l of layer l, counted from 1, in the forward
pass, L + 1 after the last of L layers, and L + 1 - l in the backward pass. ε is the spacing at 1 of the numbers the
model computes in. The theorem compares two passes from equal weights; weights apart by δ, of all parameters together,
are as good as rounded to δ, so later updates have ε + δ. The moments of an optimizer are products of gradients and have
twice the bound. Elements of a parameter with a say have gradients at most ``SIGNIFICANT`` times as far apart as the
whole gradient, and so has their update. A metric is held to the bound at the end of the forward pass, times its size or
1, since many are small differences of such numbers. Rounding is added as for stated bounds. Honest layouts were
measured at up to 2.3 times this after the first update, so the bound is 3 times it, as it is of measured noise.

This is not this model's own noise, and a verdict by it says so. From weights apart it is an estimate, which honest runs
in bfloat16 leave after a few updates (ratios begin to be clipped): beyond it, a tensor is suspicious only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mock_scheduler.comparison.bounds.bound import BoundsSource, MetricBound, TensorBound
from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.pairing.order import order_keys
from mock_scheduler.comparison.pairing.sources import FullAsSketches, SketchSource
from mock_scheduler.comparison.thresholds import (
    SAFETY,
    SIGNIFICANT,
    THEORY_FACTOR,
    THEORY_GROWTH,
    THEORY_LAYERS,
    THEORY_MOMENTS,
)
from mock_scheduler.comparison.walk.traces import find_epsilon, open_sources
from mock_scheduler.trace.entries import PHASES, Phase, TraceKey
from mock_scheduler.trace.sketch.sketch import difference

_LAYER = re.compile(r"\blayers\.(\d{1,9})\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class TheoryBounds:
    """Bounds of a model of ``num_layers`` layers.

    Args:
        num_layers: L.
        epsilon: ε.
        distances: δ of the weights before an update, by step and update.
    """

    num_layers: int
    epsilon: float
    distances: Mapping[tuple[int, int], float]

    @property
    def source(self) -> BoundsSource:
        """Returns ``theory``."""
        return "theory"

    @property
    def noise(self) -> NoiseBounds | None:
        """Nothing was measured."""
        return None

    def tensor(self, key: TraceKey) -> TensorBound:
        """Returns k · C^d · (ε + δ); an estimate where the weights before the update are apart, or unknown."""
        relative = self._error(key.step, key.update, self._depth(key))
        if key.kind == "optimizer":
            # (1 + e)² - 1 is 2e to first order.
            relative *= THEORY_MOMENTS
        elif key.kind in ("parameter", "weight"):
            # An update is a quotient of moments: only elements whose gradient is at most so far off have a say in it.
            relative *= SIGNIFICANT
        return TensorBound(
            relative=relative,
            has_rounding=True,
            unit=self.epsilon,
            # Theorem 5.3 is about equal weights; from others it is extrapolated.
            is_estimate=not self._begins_equal(key.step, key.update),
        )

    def metric(self, step: int, name: str) -> MetricBound:
        """Returns the bound of the forward pass's end, at the step's last update; relative to 1 at least."""
        # What the last update leaves behind is measured too, though no update of this step begins from it.
        last = max((update for at, update in self.distances if at == step), default=0)
        relative = self._error(step, last, self.num_layers + 1)
        return MetricBound(
            relative=relative, floor=1.0, is_estimate=not self.distances or not self._begins_equal(step, last)
        )

    def _error(self, step: int, update: int, depth: int) -> float:
        # Each layer multiplies an error by at most C, and rounding and distant weights enter it alike.
        growth = THEORY_GROWTH ** min(depth, THEORY_LAYERS)
        return SAFETY * THEORY_FACTOR * growth * (self.epsilon + self.distances.get((step, update), 0.0))

    def _begins_equal(self, step: int, update: int) -> bool:
        """Whether both runs are known to begin an update with the same weights, as the first one of a run does."""
        return self.distances.get((step, update), 0.0 if (step, update) == (0, 0) else math.inf) == 0.0

    def _depth(self, key: TraceKey) -> int:
        found = _LAYER.search(key.name)
        after_all = self.num_layers + 1
        phase = PHASES[key.kind]
        if found is not None:
            # Behind the forward pass an error has passed the layers after it, backwards.
            layer = int(found[1]) + 1
            return max(after_all - layer, 1) if phase >= Phase.BACKWARD else layer
        is_before = "embedding" in key.name
        # The embedding's gradient has passed every layer, the output's none.
        if phase >= Phase.BACKWARD:
            return after_all if is_before or phase is Phase.NORM else 1
        return 1 if is_before else after_all


def build_theory_bounds(baseline_dir: Path, candidate_dir: Path) -> TheoryBounds:
    """Builds the bounds of two traces from their layers, numbers and distances of weights.

    Parameters are read once, one at a time; by their sketches where either trace has no more.

    Raises:
        TraceError: A file is damaged.
    """
    with open_sources(baseline_dir, candidate_dir) as (baseline, candidate):
        steps = sorted(set(baseline.steps) & set(candidate.steps))
        keys = {step: baseline.keys(step) & candidate.keys(step) for step in steps}
        distances: dict[tuple[int, int], float] = {}
        for step, shared in keys.items():
            distances |= _distances(step, shared, partial(_measure, baseline, candidate))
    return TheoryBounds(
        num_layers=count_layers(key.name for shared in keys.values() for key in shared),
        epsilon=find_epsilon(candidate_dir),
        distances=distances,
    )


def count_layers(names: Iterable[str]) -> int:
    """Counts L, from the canonical names of a trace."""
    return max((int(found[1]) + 1 for found in map(_LAYER.search, names) if found is not None), default=0)


def _distances(
    step: int, keys: Collection[TraceKey], measure: Callable[[TraceKey], tuple[float, float]]
) -> dict[tuple[int, int], float]:
    """Measures δ before each update of a step, as far as both traces have the parameters."""
    squares: dict[int, tuple[float, float]] = {}
    # In a fixed order: a set of keys has another one in every process, and sums of floats follow it.
    for key in order_keys(keys):
        if key.kind in ("initial", "parameter"):
            before = 0 if key.kind == "initial" else key.update + 1
            apart, size = squares.get(before, (0.0, 0.0))
            distance, norm = measure(key)
            # Not ``**``, which raises for a float whose square no float holds.
            squares[before] = (apart + distance * distance, size + norm * norm)
    # Of all parameters together: one small bias far apart does not move the forward pass.
    return {(step, update): math.sqrt(apart / size) if size else 0.0 for update, (apart, size) in squares.items()}


def _measure(baseline: SketchSource, candidate: SketchSource, key: TraceKey) -> tuple[float, float]:
    """Returns ||a - b|| and ||a||; both 0 where the two have other shapes, which is a finding by itself."""
    if isinstance(baseline, FullAsSketches) and isinstance(candidate, FullAsSketches):
        ours, theirs = baseline.merge(key).tensor, candidate.merge(key).tensor
        if ours.shape != theirs.shape:
            return 0.0, 0.0
        # In place, since a float64 copy has up to four times the bytes of the tensor.
        apart = float(ours.to(torch.float64, copy=True).sub_(theirs).norm())
        return apart, float(ours.double().norm())
    mine, other = baseline.sketch(key).sketch, candidate.sketch(key).sketch
    if mine.num_elements != other.num_elements:
        return 0.0, 0.0
    return difference(mine, other).norm_difference, mine.norm
