"""What perturbed runs of a baseline measured, and the bounds that follow.

Of every tensor, r is ||a - b|| / ||a|| (of a parameter: of the change that one update made to it) between the baseline
a and a perturbed run b: p is its median over the runs, P its largest. The bound is 3 · max(P, 4u), with u the unit
roundoff of what accumulates (2^-24; 2^-53 in float64): an honest change of layout in float32 was measured at no more
than 1.13 p on any tensor, ill-conditioned ones included, and in bfloat16 at about half of P, so that 3 leaves room on
both sides, and where perturbed runs differ more from each other it is more than 3 (``heavy_tails``). Held to the bounds
of the four others, of 25 perturbed runs in bfloat16 12 had something beyond 3 P, and 4 something beyond these; of 25 in
float32 2 and 1.

Of a tensor that is 0 in the baseline, ||b|| stands in for r. What no perturbation moved may still be rounded (a KL of
two policies that are one in one process is exactly 0, and not where tensor parallelism adds differently for each), so
that it is allowed the rounding that ``judging`` gives to any tensor of its kind. Of a metric the same holds at each
step, of |a - b|. Shares of tokens have bounds of their own (``token_shares``). What was not measured has no bound and
is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from mock_scheduler.compare.bounds.bounds import BoundsSource, MetricBound, TensorBound
from mock_scheduler.compare.bounds.heavy_tails import Pool, describe_factors, find_factors
from mock_scheduler.compare.bounds.tensor_noise import TensorNoise
from mock_scheduler.compare.bounds.token_shares import TokenShares, is_share
from mock_scheduler.compare.pairing.routing import is_choice
from mock_scheduler.support.text import count_of
from mock_scheduler.trace.entries import PHASES, Phase, TraceKey

#: How many times the noise that was measured a difference may be.
SAFETY = 3.0
#: Unit roundoffs of what accumulates, below which noise is not told from none.
FEWEST_ROUNDINGS = 4.0
_METRIC = "metric"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
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

    @cached_property
    def factors(self) -> dict[Pool, float]:
        """How many times its largest noise a tensor or metric may differ, where that is more than ``SAFETY``."""
        return find_factors(self._samples(), usual=SAFETY, smallest=self.smallest)

    @cached_property
    def _shares(self) -> TokenShares:
        return TokenShares.collect(self.tensors, self.metrics, self.metric_values)

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
        """3 · max(P, 4u), or more where runs differ so; infinite where it was not measured."""
        found = self.tensors.get(key)
        if found is None:
            return TensorBound(relative=math.inf)
        if is_share(key.name):
            largest = self._shares.of_tensor(key, times=SAFETY)
            return TensorBound(relative=0.0, absolute=largest, has_rounding=True)
        if is_choice(key):
            return TensorBound(relative=0.0, fraction=SAFETY * self._largest_choice(key.step, key.update))
        if not found.largest:
            is_computed = PHASES[key.kind] >= Phase.FORWARD
            return TensorBound(relative=SAFETY * self.smallest, has_rounding=is_computed, unit=self.epsilon)
        if math.isinf(found.largest):
            return TensorBound(relative=0.0, absolute=SAFETY * found.absolute)
        return TensorBound(relative=self.factors.get(_pool(key), SAFETY) * max(found.largest, self.smallest))

    def _samples(self) -> Iterator[tuple[Pool, Sequence[float]]]:
        """The noise of all runs, relative to the baseline, of each tensor and metric that is a real number."""
        for key, noise in self.tensors.items():
            if not _is_decided(key):
                yield _pool(key), noise.relative
        for (step, name), changes in self.metrics.items():
            value = abs(self.metric_values[step, name])
            if value and not is_share(name):
                yield (_METRIC, step, 0), [abs(change) / value for change in changes]

    def _largest_choice(self, step: int, update: int) -> float:
        """Of all choices of experts of an update, since one layer's few flips are a matter of chance."""
        choices = (
            noise.largest
            for key, noise in self.tensors.items()
            if (key.step, key.update) == (step, update) and is_choice(key)
        )
        return max(choices, default=0.0)

    def metric(self, step: int, name: str) -> MetricBound:
        """3 · max(the largest |a - b|, 4u · |a|), or more where runs differ so; infinite where it was not measured."""
        found = self.metrics.get((step, name))
        if found is None:
            return MetricBound(absolute=math.inf)
        if is_share(name):
            return MetricBound(absolute=self._shares.of_metric(step, name, times=SAFETY))
        largest = max(map(abs, found))
        least = self.smallest * abs(self.metric_values[step, name])
        return MetricBound(absolute=self.factors.get((_METRIC, step, 0), SAFETY) * max(largest, least))

    def level(self) -> str:
        """``the noise of 5 perturbed runs``."""
        return f"the noise of {count_of(self.num_runs, 'perturbed run')}"

    def describe(self) -> str:
        """The formula, and from what it was measured."""
        more = describe_factors(self.factors)
        times = f"{SAFETY:g} times{f' ({more})' if more else ''}"
        size = f"{self.unit_roundoffs:g} unit roundoff"
        return (
            f"Each tensor's and metric's own noise: {times} the largest difference that {self.num_runs} runs with "
            f"weights perturbed by {size} have of the baseline, and at least {SAFETY * self.smallest:.1e} of its size: "
            "||a-b|| / ||a||, of the change d by an update ||d_a-d_b|| / ||d_a||, of metrics |a-b|; integers equal. a "
            f"is the baseline, b the candidate; NaN equals NaN only.{_describe_held_out(self.held_out)}"
        )

    @cached_property
    def held_out(self) -> tuple[int, ...]:
        """Of each perturbed run, how many tensors and metrics are beyond the bounds that the other runs give.

        One rounding made it, so that these would be false alarms. What no other run moved, and whole decisions, are
        left out. Bounds of one run less are narrower than those that a candidate is held to; of fewer than two others
        there are none.
        """
        return tuple(map(self._count_beyond, range(self.num_runs))) if self.num_runs > 2 else ()

    def _count_beyond(self, run: int) -> int:
        others = replace(
            self,
            seeds=_without(self.seeds, run),
            tensors={key: replace(item, relative=_without(item.relative, run)) for key, item in self.tensors.items()},
            metrics={place: _without(changes, run) for place, changes in self.metrics.items()},
        )
        tensors = sum(
            item.relative[run] > others.tensor(key).relative
            for key, item in self.tensors.items()
            if not _is_decided(key) and 0.0 < others.tensors[key].largest < math.inf
        )
        metrics = sum(
            abs(changes[run]) > others.metric(*place).absolute
            for place, changes in self.metrics.items()
            if not is_share(place[1]) and any(others.metrics[place])
        )
        return tensors + metrics

    def advice(self) -> str:
        """Nothing: these are measured."""
        return ""


def _is_decided(key: TraceKey) -> bool:
    """Whether a tensor is of whole decisions, and no rounding by itself."""
    return is_choice(key) or is_share(key.name)


def _without(values: tuple[_T, ...], place: int) -> tuple[_T, ...]:
    return values[:place] + values[place + 1 :]


def _describe_held_out(beyond: Sequence[int]) -> str:
    if not beyond:
        return ""
    wrong = [count for count in beyond if count]
    each = f", in {count_of(wrong[0], 'figure')}" if len(wrong) == 1 else f", in {', '.join(map(str, wrong))} figures"
    found = f"{len(wrong)} {'is beyond its' if len(wrong) == 1 else 'are beyond their'} bounds{each}"
    return f" Of these {len(beyond)} runs, each held to the others, {found if wrong else 'none is beyond its bounds'}."


def _pool(key: TraceKey) -> Pool:
    return key.kind, key.step, key.update
