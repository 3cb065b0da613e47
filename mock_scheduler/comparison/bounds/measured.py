"""The measured noise of a baseline, from its perturbed runs, and the bounds it gives.

For every tensor, r is the relative difference between the baseline a and a perturbed run b; p is its median over the
runs, P its largest. The bound is 3 · max(P, 4u), with u the unit roundoff of accumulation (2^-24; 2^-53 in float64). An
honest change of layout was measured at 1.13 p or less in float32 on any tensor, ill-conditioned ones included, and at
about half of P in bfloat16, so 3 leaves room on both sides. Where perturbed runs differ more from each other, the
factor is larger than 3 (``tensor_noise``). Held to the bounds of the four others, 12 of 25 perturbed runs in bfloat16
had something beyond 3 P, and 4 something beyond these bounds; in float32, 2 and 1 of 25.

Where a tensor of the baseline is 0, ||b|| stands in for r. A tensor no perturbation moved may still be rounded (a KL of
two equal policies is exactly 0 in one process, and not where tensor parallelism adds differently for each), so it is
allowed the rounding ``measure.distance`` gives to any tensor of its kind. A metric is bounded in the same way at each
step, by |a - b|. Nothing else has a bound, and it is not judged.

Shares of tokens (``clip_frac``) move by whole tokens at any update: a ratio moved over the bound of the clip by
rounding turns one token. Perturbed runs show few of these, and at other updates than a candidate does. So a share is
held to the largest change any perturbed run has of it in any update, and one token may always differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from mock_scheduler.comparison.bounds.bound import BoundsSource, MetricBound, TensorBound
from mock_scheduler.comparison.bounds.tensor_noise import Pool, TensorNoise, find_factors
from mock_scheduler.comparison.thresholds import FEWEST_ROUNDINGS, SAFETY
from mock_scheduler.trace.entries import PHASES, Phase, TraceKey
from mock_scheduler.trace.names import is_choice

_METRIC = "metric"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class NoiseBounds:
    """Holds the measured noise of one baseline, as bounds.

    Args:
        baseline: Digest of the baseline's run.
        seeds: Of the perturbations.
        unit_roundoffs: Their size.
        unit: u, the unit roundoff of accumulation.
        epsilon: Spacing at 1 of the numbers the model computes in.
        tensors: Noise by key.
        metrics: By step and name, b - a of each perturbed run.
        metric_values: By step and name, the baseline's value.
        trace_dirs: Of the perturbed runs, read again to tell whether a place in a tensor is noisy by itself.
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
        """How many times its largest noise a tensor or metric may differ, where more than ``SAFETY``."""
        return find_factors(self._samples(), usual=SAFETY, smallest=self.smallest)

    @cached_property
    def _shares(self) -> TokenShares:
        return TokenShares.collect(self.tensors, self.metrics, self.metric_values)

    @property
    def num_runs(self) -> int:
        """Returns K: perturbed runs."""
        return len(self.seeds)

    @property
    def smallest(self) -> float:
        """The finest relative difference accumulation can tell apart."""
        return FEWEST_ROUNDINGS * self.unit

    @property
    def source(self) -> BoundsSource:
        """Returns ``noise``."""
        return "noise"

    @property
    def noise(self) -> NoiseBounds:
        """Returns itself."""
        return self

    def tensor(self, key: TraceKey) -> TensorBound:
        """Returns 3 · max(P, 4u), or more where runs differ so; infinite where it was not measured."""
        found = self.tensors.get(key)
        if found is None:
            return TensorBound(relative=math.inf)
        # A share moves by whole tokens, at updates that differ from run to run, so its own noise says little.
        if is_share(key.name):
            largest = self._shares.of_tensor(key, times=SAFETY)
            return TensorBound(relative=0.0, absolute=largest, has_rounding=True)
        if is_choice(key):
            # One layer's few flips are a matter of chance, so all choices of the update give the bound.
            return TensorBound(relative=0.0, fraction=SAFETY * self._largest_choice(key.step, key.update))
        if not found.largest:
            # Inputs and initial weights are loaded rather than computed: they have no rounding.
            is_computed = PHASES[key.kind] >= Phase.FORWARD
            return TensorBound(relative=SAFETY * self.smallest, has_rounding=is_computed, unit=self.epsilon)
        # The baseline is 0 and a perturbed run is not, so only an absolute bound makes sense.
        if math.isinf(found.largest):
            return TensorBound(relative=0.0, absolute=SAFETY * found.absolute)
        return TensorBound(relative=self.factors.get(_pool(key), SAFETY) * max(found.largest, self.smallest))

    def _samples(self) -> Iterator[tuple[Pool, Sequence[float]]]:
        """Yields the noise of all runs, relative to the baseline, of each tensor and metric with real numbers."""
        for key, noise in self.tensors.items():
            if not _is_decided(key):
                yield _pool(key), noise.relative
        for (step, name), changes in self.metrics.items():
            # The largest noise over the second largest is a ratio, so that a metric's own unit does not matter.
            value = abs(self.metric_values[step, name])
            if value and not is_share(name):
                yield (_METRIC, step, 0), [abs(change) / value for change in changes]

    def _largest_choice(self, step: int, update: int) -> float:
        """Returns the largest noise of all choices of experts of an update."""
        choices = (
            noise.largest
            for key, noise in self.tensors.items()
            if (key.step, key.update) == (step, update) and is_choice(key)
        )
        return max(choices, default=0.0)

    def metric(self, step: int, name: str) -> MetricBound:
        """Returns 3 · max(the largest |a - b|, 4u · |a|), or more where runs differ so; infinite where not measured."""
        found = self.metrics.get((step, name))
        if found is None:
            return MetricBound(absolute=math.inf)
        if is_share(name):
            return MetricBound(absolute=self._shares.of_metric(step, name, times=SAFETY))
        # The largest of the runs and not their median: a candidate is one more run like them.
        largest = max(map(abs, found))
        # Runs that happened to agree do not make a metric exact.
        least = self.smallest * abs(self.metric_values[step, name])
        return MetricBound(absolute=self.factors.get((_METRIC, step, 0), SAFETY) * max(largest, least))

    @cached_property
    def held_out(self) -> tuple[int, ...]:
        """Counts, for each perturbed run, the tensors and metrics beyond the bounds that the other runs give.

        One rounding made each run, so these would be false alarms. Tensors no other run moved, and whole decisions, are
        left out. The bounds come from one run less, so they are narrower than a candidate's. With fewer than two others
        there are none.
        """
        # Leave-one-out: with two runs the bound would come from a single one, whose tail says nothing.
        return tuple(map(self._count_beyond, range(self.num_runs))) if self.num_runs > 2 else ()

    def _count_beyond(self, run: int) -> int:
        # Leaving one run out leaves its seed, its tensors and its metrics out together.
        others = replace(
            self,
            seeds=_without(self.seeds, run),
            tensors={key: replace(item, relative=_without(item.relative, run)) for key, item in self.tensors.items()},
            metrics={place: _without(changes, run) for place, changes in self.metrics.items()},
        )
        tensors = sum(
            item.relative[run] > others.tensor(key).relative
            for key, item in self.tensors.items()
            # Without any noise in the other runs, the bound is rounding alone, and nothing was learned from them.
            if not _is_decided(key)
            and len(item.relative) == self.num_runs
            and 0.0 < others.tensors[key].largest < math.inf
        )
        metrics = sum(
            abs(changes[run]) > others.metric(*place).absolute
            for place, changes in self.metrics.items()
            if not is_share(place[1]) and len(changes) == self.num_runs and any(others.metrics[place])
        )
        return tensors + metrics


def _is_decided(key: TraceKey) -> bool:
    """Whether a tensor consists of whole decisions rather than of rounded numbers."""
    return is_choice(key) or is_share(key.name)


def _without(values: tuple[_T, ...], place: int) -> tuple[_T, ...]:
    return values[:place] + values[place + 1 :]


def _pool(key: TraceKey) -> Pool:
    return key.kind, key.step, key.update


_SUFFIX = "_frac"
#: Response tokens of an update, as a traced scalar and as a metric; and updates of a step.
_TRACED_TOKENS, _NUM_TOKENS, _NUM_UPDATES = "mean.num_response_tokens", "num_response_tokens", "num_updates"

Metric = tuple[int, str]
"""Step and name of a logged value."""


def is_share(name: str) -> bool:
    """Whether a scalar of the loss or a metric is a share of tokens."""
    return name.endswith(_SUFFIX)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShares:
    """The largest change of each share, and the number of tokens it is a share of.

    Args:
        traced: By name, of traced scalars.
        logged: By name, of metrics.
        num_traced: By step and update, response tokens.
        num_logged: By step, response tokens of all its updates.
    """

    traced: Mapping[str, float]
    logged: Mapping[str, float]
    num_traced: Mapping[tuple[int, int], float]
    num_logged: Mapping[int, float]

    @classmethod
    def collect(
        cls,
        tensors: Mapping[TraceKey, TensorNoise],
        metrics: Mapping[Metric, tuple[float, ...]],
        values: Mapping[Metric, float],
    ) -> TokenShares:
        """Collects the noise of tensors and of metrics (b - a of each perturbed run), and the baseline's metrics."""
        traced: dict[str, float] = {}
        logged: dict[str, float] = {}
        for key, noise in tensors.items():
            if is_share(key.name):
                # Over all steps and updates: which of them a token turns at is chance.
                traced[key.name] = max(noise.distance, traced.get(key.name, 0.0))
        for (_, name), changes in metrics.items():
            if is_share(name):
                logged[name] = max(*map(abs, changes), logged.get(name, 0.0))
        return cls(
            traced=traced,
            logged=logged,
            num_traced={
                (key.step, key.update): noise.size for key, noise in tensors.items() if key.name == _TRACED_TOKENS
            },
            num_logged={
                # The logged number is a mean over updates; a share's mean is over the tokens of all of them.
                step: value * values.get((step, _NUM_UPDATES), 1.0)
                for (step, name), value in values.items()
                if name == _NUM_TOKENS
            },
        )

    def of_tensor(self, key: TraceKey, *, times: float) -> float:
        """Returns how much a traced share may differ: ``times`` its largest change, and one token at least."""
        # One token turned by rounding is honest, however few tokens an update has.
        return max(times * self.traced[key.name], _one_of(self.num_traced.get((key.step, key.update))))

    def of_metric(self, step: int, name: str, *, times: float) -> float:
        """Returns how much a logged share, the mean of a step's updates, may differ."""
        return max(times * self.logged[name], _one_of(self.num_logged.get(step)))


def _one_of(count: float | None) -> float:
    return 1.0 / count if count else 0.0
