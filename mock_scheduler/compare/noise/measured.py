"""What perturbed runs of a baseline measured, and the bounds that follow.

Of every tensor, r is ||a - b|| / ||a|| (of a parameter: of the change that one update made to it) between the baseline
a and a perturbed run b: p is its median over the runs, P its largest. The bound is 3 · max(P, 4u), with u the unit
roundoff of what accumulates (2^-24; 2^-53 in float64): an honest change of layout in float32 was measured at no more
than 1.13 p on any tensor, ill-conditioned ones included, and in bfloat16 at about half of P, so that 3 leaves room on
both sides. Of a tensor that is 0 in the baseline, ||b|| stands in for r. What no perturbation moved may still be
rounded (a KL of two policies that are one in one process is exactly 0, and not where tensor parallelism adds
differently for each), so that it is allowed the rounding that ``judging`` gives to any tensor of its kind. Of a metric
the same holds at each step, of |a - b|. What was not measured has no bound and is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mock_scheduler.compare.bounds import BoundsSource, MetricBound, TensorBound
from mock_scheduler.compare.routing import is_choice
from mock_scheduler.text import count_of
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.kinds import PHASES, Phase

#: How many times the noise that was measured a difference may be.
SAFETY = 3.0
#: Unit roundoffs of what accumulates, below which noise is not told from none.
FEWEST_ROUNDINGS = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNoise:
    """One tensor over the perturbed runs. relative: r of each; inf where only the baseline is 0.

    absolute: the largest ||b|| where the baseline is 0, else 0. slopes: <a, b> / <a, a> of each; empty where the
    tensor has none.
    """

    relative: tuple[float, ...]
    absolute: float = 0.0
    slopes: tuple[float, ...] = ()

    @property
    def usual(self) -> float:
        """p: the median."""
        return median(self.relative)

    @property
    def largest(self) -> float:
        """P: the largest."""
        return max(self.relative)

    @property
    def slope_spread(self) -> float:
        """The standard deviation of the slopes about 1; 0 where there is none."""
        return math.sqrt(sum((slope - 1.0) ** 2 for slope in self.slopes) / max(len(self.slopes), 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseBounds:
    """The measured noise of one baseline, as bounds.

    baseline: digest of the baseline's run. seeds: of the perturbations. unit_roundoffs: their size. unit: u of what
    accumulates. epsilon: spacing at 1 of the numbers that the model computes in. tensors: by key. metrics: by step and
    name, b - a of each perturbed run. trace_dirs: of the perturbed runs; they are read again to tell whether a place in
    a tensor is noisy by itself, as far as they are still there.
    """

    baseline: str
    seeds: tuple[int, ...]
    unit_roundoffs: float
    unit: float
    epsilon: float
    tensors: Mapping[TraceKey, TensorNoise]
    metrics: Mapping[tuple[int, str], tuple[float, ...]]
    metric_values: Mapping[tuple[int, str], float]
    trace_dirs: tuple[Path, ...] = ()

    @property
    def num_runs(self) -> int:
        """K: perturbed runs."""
        return len(self.seeds)

    @property
    def smallest(self) -> float:
        """What is added up cannot be told apart more finely, relative to its size."""
        return FEWEST_ROUNDINGS * self.unit

    @property
    def source(self) -> BoundsSource:
        """``noise``."""
        return "noise"

    @property
    def noise(self) -> NoiseBounds:
        """Itself."""
        return self

    def tensor(self, key: TraceKey) -> TensorBound:
        """3 · max(P, 4u); infinite where it was not measured."""
        found = self.tensors.get(key)
        if found is None:
            return TensorBound(relative=math.inf)
        if is_choice(key):
            return TensorBound(relative=0.0, fraction=SAFETY * self._largest_choice(key.step, key.update))
        if not found.largest:
            is_computed = PHASES[key.kind] >= Phase.FORWARD
            return TensorBound(relative=SAFETY * self.smallest, has_rounding=is_computed, unit=self.epsilon)
        if math.isinf(found.largest):
            return TensorBound(relative=0.0, absolute=SAFETY * found.absolute)
        return TensorBound(relative=SAFETY * max(found.largest, self.smallest))

    def _largest_choice(self, step: int, update: int) -> float:
        """Of all choices of experts of an update, since one layer's few flips are a matter of chance."""
        choices = (
            noise.largest
            for key, noise in self.tensors.items()
            if (key.step, key.update) == (step, update) and is_choice(key)
        )
        return max(choices, default=0.0)

    def metric(self, step: int, name: str) -> MetricBound:
        """3 · max(the largest |a - b|, 4u · |a|); infinite where it was not measured."""
        found = self.metrics.get((step, name))
        if found is None:
            return MetricBound(absolute=math.inf)
        largest = max(map(abs, found))
        return MetricBound(absolute=SAFETY * max(largest, self.smallest * abs(self.metric_values[step, name])))

    def level(self) -> str:
        """``the noise of 5 perturbed runs``."""
        return f"the noise of {count_of(self.num_runs, 'perturbed run')}"

    def describe(self) -> str:
        """The formula, and from what it was measured."""
        return (
            f"Each tensor's and metric's own noise: {SAFETY:g} times the largest difference that {self.num_runs} runs "
            f"with weights perturbed by {self.unit_roundoffs:g} unit roundoff have of the baseline, and at least "
            f"{SAFETY * self.smallest:.1e} of its size: ||a-b|| / ||a||, of the change d by an update ||d_a-d_b|| / "
            "||d_a||, of metrics |a-b|; integers equal. a is the baseline, b the candidate; NaN equals NaN only."
        )

    def advice(self) -> str:
        """Nothing: these are measured."""
        return ""
