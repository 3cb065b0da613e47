"""Whether differences go one way over steps: a bias that each step hides in its noise, and training adds up.

Of a series of changes x (a metric's b - a by step; the median of an update's slopes - 1), each in units of what the
perturbed runs' changes are at that step, the signs are counted: with n of them not 0, (n₊ - n₋) / √n beyond 3 is no
chance. Steps of one training are not independent, though: once two runs part they stay apart on one side. So the mean
of the series must also be more than 3 times the largest mean of the perturbed runs, which part in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mock_scheduler.compare.bounds.measured import SAFETY, NoiseBounds
from mock_scheduler.compare.noise.slopes import SlopeSummary
from mock_scheduler.compare.noise.suspicions import Suspicion, TestSummary
from mock_scheduler.compare.walk.metrics import MetricComparison
from mock_scheduler.support.text import count_of

#: Standard deviations of the sum of fair signs.
LARGEST_SIGMA = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """changes: of the candidate. noise: of each perturbed run, the same length. smallest: below which each change is
    nothing. places: in words, of what each is."""

    name: str
    changes: tuple[float, ...]
    noise: tuple[tuple[float, ...], ...]
    smallest: tuple[float, ...]
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """sigma: (n₊ - n₋) / √n of the candidate. mean: of its changes in units of noise. noise_mean: the largest |mean| of
    the perturbed runs."""

    num_signs: int
    sigma: float
    mean: float
    noise_mean: float

    @property
    def is_one_way(self) -> bool:
        """Whether it goes one way, and further than perturbed runs do."""
        return abs(self.sigma) > LARGEST_SIGMA and abs(self.mean) > SAFETY * self.noise_mean


def measure_drift(series: Series) -> Drift:
    """The drift of one series."""
    units = [
        max(math.sqrt(sum(run[place] ** 2 for run in series.noise) / len(series.noise)), series.smallest[place])
        for place in range(len(series.changes))
    ]
    sigma, mean, num_signs = _drift(series.changes, units)
    noise_mean = max(abs(_drift(run, units)[1]) for run in series.noise)
    return Drift(num_signs=num_signs, sigma=sigma, mean=mean, noise_mean=noise_mean)


def judge_drifts(
    metrics: MetricComparison | None, slopes: Sequence[SlopeSummary], noise: NoiseBounds
) -> tuple[list[Suspicion], TestSummary]:
    """Metrics and slopes that go one way, and how many series were looked at."""
    series = [*_metric_series(metrics, noise), *_slope_series(slopes, noise)]
    enough = [item for item in series if len(item.changes) > LARGEST_SIGMA**2]
    found = []
    for item in enough:
        drift = measure_drift(item)
        if drift.is_one_way:
            found.append(_describe(item, drift))
    if enough:
        text = f"{count_of(len(enough), 'series', 'series')} over steps do not drift"
    else:
        text = f"drift was not tested, which takes more than {LARGEST_SIGMA**2:g} steps or updates"
    return found, TestSummary(test="drift", num_looked_at=len(enough), smallest=None, text=text)


def _drift(changes: Sequence[float], units: Sequence[float]) -> tuple[float, float, int]:
    """Sigma, mean in units of noise, and how many changes are not 0."""
    signs = [math.copysign(1.0, item) for item in changes if item]
    if not signs:
        return 0.0, 0.0, 0
    scaled = [change / unit for change, unit in zip(changes, units, strict=True) if unit]
    return sum(signs) / math.sqrt(len(signs)), sum(scaled) / max(len(scaled), 1), len(signs)


def _metric_series(metrics: MetricComparison | None, noise: NoiseBounds) -> list[Series]:
    found = []
    for difference in metrics.differences if metrics is not None else ():
        measured: Mapping[int, tuple[float, ...]] = {
            step: noise.metrics[step, difference.name]
            for step, _ in difference.changes
            if len(noise.metrics.get((step, difference.name), ())) == noise.num_runs
        }
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
                    what=f"metric {difference.name}",
                )
            )
    return found


def _slope_series(slopes: Sequence[SlopeSummary], noise: NoiseBounds) -> list[Series]:
    complete = [item for item in slopes if len(item.noise_medians) == noise.num_runs]
    if not complete:
        return []
    return [
        Series(
            name="",
            changes=tuple(item.median for item in complete),
            noise=tuple(zip(*(item.noise_medians for item in complete), strict=True)),
            smallest=(noise.smallest,) * len(complete),
            what="the size of the gradients",
        )
    ]


def _describe(series: Series, drift: Drift) -> Suspicion:
    way = "larger" if drift.sigma > 0 else "smaller"
    return Suspicion(
        test="drift",
        step=None,
        update=None,
        name=series.name,
        value=abs(drift.mean),
        limit=SAFETY * drift.noise_mean,
        text=(
            f"{series.what} is {way} in the candidate at nearly every one of {drift.num_signs} places "
            f"({drift.sigma:+.1f} sigma), on average by {abs(drift.mean):.2g} times its noise, where perturbed runs "
            f"have at most {drift.noise_mean:.2g}: a bias that adds up"
        ),
    )
