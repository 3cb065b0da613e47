"""All tests for errors within the noise, and the step from which the noise hides everything.

*Drift*: whether differences go one way over steps, as a bias does that the noise of each step hides and training adds
up. For a series of changes x (a metric's b - a by step; the median of an update's slopes - 1), each in units of the
perturbed runs' changes at the same step, signs are counted: with n of them not 0, (n₊ - n₋) / √n beyond 3 is no chance.
Steps of one training are not independent, though: once two runs part they stay apart on one side. So the mean of the
series must also be more than 3 times the largest mean of the perturbed runs, which part in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.noise.slopes import (
    SlopeSummary,
    judge_behind_equal_forward,
    judge_slopes,
    summarise_slopes,
)
from mock_scheduler.comparison.noise.suspicions import Drift, NoiseVerdict, NoisyPlace, Suspicion, TestSummary
from mock_scheduler.comparison.tensors import JUDGED_KINDS, TensorComparison, TensorDifference
from mock_scheduler.comparison.thresholds import FEWEST_SERIES, MOST_SUSPICIONS, SAFETY
from mock_scheduler.comparison.walk.metrics import MetricComparison


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Holds a figure over steps or updates.

    Args:
        name: Of the metric; empty for the size of the gradients.
        changes: Of the candidate from the baseline.
        noise: Of each perturbed run from the baseline, the same length.
        smallest: Below which each change is nothing.
    """

    name: str
    changes: tuple[float, ...]
    noise: tuple[tuple[float, ...], ...]
    smallest: tuple[float, ...]


def measure_drift(series: Series) -> Drift:
    """Measures the drift of one series."""
    # The root mean square of the runs at the step, since noise grows over a training.
    units = [
        max(math.hypot(*(run[place] for run in series.noise)) / math.sqrt(len(series.noise)), series.smallest[place])
        for place in range(len(series.changes))
    ]
    # The same units for candidate and runs, so that their means can be held against each other.
    sigma, mean, num_signs = _drift(series.changes, units)
    # Honest runs stay on one side too once they have parted; the furthest of them is the measure.
    noise_mean = max(abs(_drift(run, units)[1]) for run in series.noise)
    return Drift(num_signs=num_signs, sigma=sigma, mean=mean, noise_mean=noise_mean)


def judge_drifts(
    metrics: MetricComparison | None, slopes: Sequence[SlopeSummary], noise: NoiseBounds
) -> tuple[list[Suspicion], TestSummary]:
    """Finds metrics and slopes going one way, and counts the series."""
    series = [*_metric_series(metrics, noise), *_slope_series(slopes, noise)]
    # Fewer changes cannot be beyond 3 sigma, even all of one sign.
    enough = [item for item in series if len(item.changes) > FEWEST_SERIES]
    found = []
    for item in enough:
        drift = measure_drift(item)
        if drift.is_one_way:
            found.append(_suspect(item, drift))
    return found, TestSummary(test="drift", num_looked_at=len(enough))


def _drift(changes: Sequence[float], units: Sequence[float]) -> tuple[float, float, int]:
    """Returns sigma, the mean in units of noise, and how many changes are not 0."""
    # Signs rather than sizes: one large change must not make a drift.
    signs = [math.copysign(1.0, item) for item in changes if item]
    # Equal at every step: nothing drifts.
    if not signs:
        return 0.0, 0.0, 0
    scaled = [change / unit for change, unit in zip(changes, units, strict=True) if unit]
    # The sign test: n fair signs have a sum of variance n.
    return sum(signs) / math.sqrt(len(signs)), sum(scaled) / max(len(scaled), 1), len(signs)


def _metric_series(metrics: MetricComparison | None, noise: NoiseBounds) -> list[Series]:
    found = []
    for difference in metrics.differences if metrics is not None else ():
        measured: Mapping[int, tuple[float, ...]] = {
            step: noise.metrics[step, difference.name]
            for step, _ in difference.changes
            if len(noise.metrics.get((step, difference.name), ())) == noise.num_runs
        }
        # Only steps that every perturbed run logged: their series must be as long.
        rows = [(step, change) for step, change in difference.changes if step in measured]
        if rows:
            found.append(
                Series(
                    name=difference.name,
                    changes=tuple(change for _, change in rows),
                    noise=tuple(zip(*(measured[step] for step, _ in rows), strict=True)),
                    smallest=tuple(
                        noise.smallest * abs(noise.metric_values[step, difference.name]) for step, _ in rows
                    ),
                )
            )
    return found


def _slope_series(slopes: Sequence[SlopeSummary], noise: NoiseBounds) -> list[Series]:
    # A run that lacks an update would make its series another one.
    complete = [item for item in slopes if len(item.noise_medians) == noise.num_runs]
    if not complete:
        return []
    return [
        Series(
            name="",
            changes=tuple(item.median for item in complete),
            noise=tuple(zip(*(item.noise_medians for item in complete), strict=True)),
            smallest=(noise.smallest,) * len(complete),
        )
    ]


def _suspect(series: Series, drift: Drift) -> Suspicion:
    return Suspicion(
        test="drift",
        step=None,
        update=None,
        name=series.name,
        value=abs(drift.mean),
        limit=SAFETY * drift.noise_mean,
        fact=drift,
    )


def judge_noise(metrics: MetricComparison | None, tensors: TensorComparison | None, noise: NoiseBounds) -> NoiseVerdict:
    """Tests slopes, also behind an equal forward pass, places and drifts.

    At level ``sketch``, where tensors have no slopes and places, drifts of metrics.
    """
    differences = () if tensors is None else tensors.differences
    numbers: Mapping[str, float] = {} if tensors is None else tensors.numbers
    # Slopes with measured noise first: they say how far noise would have gone.
    slopes, slope_test = judge_slopes(differences, noise, numbers=numbers)
    # A tensor with another scale is told of once, by the test that needs no equal forward pass.
    told = {(item.step, item.update, item.name) for item in slopes}
    behind = judge_behind_equal_forward(differences, noise, numbers=numbers)
    slopes += [item for item in behind if (item.step, item.update, item.name) not in told]
    places = [_from_place(item) for item in differences if item.localities and not item.exceeds]
    drifts, drift_test = judge_drifts(metrics, summarise_slopes(differences, noise), noise)
    # The earliest suspicion is the likeliest cause of the others.
    in_time = sorted([*slopes, *places[:MOST_SUSPICIONS]], key=lambda item: (item.step or 0, item.update or 0))
    tests = (
        slope_test,
        TestSummary(test="locality", num_looked_at=0 if tensors is None else tensors.num_located),
        drift_test,
    )
    return NoiseVerdict(suspicions=(*in_time, *drifts), tests=tests)


def first_hidden_step(tensors: TensorComparison) -> int | None:
    """Finds the step from which no gradient and no parameter is judged, all being noise; ``None`` for none."""
    hidden: int | None = None
    for step in reversed(tensors.steps):
        items = [item for item in tensors.differences if item.key.step == step and item.key.kind in JUDGED_KINDS]
        # A later step that is judged shows that noise did not hide the earlier one for good.
        if not items or any(item.is_judged for item in items):
            break
        hidden = step
    return hidden


def _from_place(item: TensorDifference) -> Suspicion:
    return Suspicion(
        test="locality",
        step=item.key.step,
        update=item.key.update,
        name=item.key.name,
        value=item.localities[0].share,
        limit=item.localities[0].fraction,
        fact=NoisyPlace(key=item.key, locality=item.localities[0]),
    )
