"""Compares the logged metrics of two runs step by step and in both directions.

Contract: ``metrics.jsonl`` has one object per global step, ``{"step": int, "metrics": {name: number}}``, with floats in
full precision; JSON has no NaN or infinity, so these are the texts ``nan``, ``inf`` and ``-inf``. A step or metric on
one side only is a finding. NaN equals NaN and differs infinitely from every number.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.comparison.bounds.bound import MetricBound
from mock_scheduler.comparison.bounds.bounds import Bounds
from mock_scheduler.comparison.findings import SIDES, AbsentSteps, Finding, NotLogged, other_side
from mock_scheduler.comparison.pairing.selection import EVERYTHING, Selection, split_missing_steps
from mock_scheduler.errors import TraceError
from mock_scheduler.support.files import whole_lines
from mock_scheduler.support.foreign_files import describe_failure, read_raw_lines
from mock_scheduler.support.run_files import METRICS_FILE
from mock_scheduler.support.text import is_real, printable, shorten

logger = logging.getLogger("mock_scheduler.metrics")

#: Wall-clock values, and values of the run that recorded rather than of this one.
NOT_COMPUTED_PREFIXES = ("time/", "rollout/", "recorded/")

#: Those, and a run's own distance from its recording, which is rounding itself where all is well.
NON_COMPARABLE_PREFIXES = (*NOT_COMPUTED_PREFIXES, "rollout_logprob_diff_", "rollout_corr/", "mismatch/")

_NON_FINITE = ("nan", "inf", "-inf")

MetricLog = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricDifference:
    """Holds one metric over all steps logged by both runs.

    Args:
        name: As logged.
        num_steps: Steps compared.
        bit_equal: Equal to the last bit at every step.
        max_abs: The largest ``|a - b|``.
        max_abs_step: Where.
        max_relative: The largest ``|a - b| / max(|a|, |b|, floor)``, with the floor of its bound.
        max_relative_step: Where.
        times_bound: How many times its bound ``|a - b|`` is at most; 0/0 = 0.
        nearest_step: Where.
        bound: Of ``|a - b|`` there.
        first_different_step: ``None`` where bits are equal.
        first_exceeding_step: ``None`` where nothing is beyond its bound.
        changes: b - a by step, where both are finite.
        is_estimate: Every exceeded bound was extrapolated.
        is_zero: Both are exactly 0 at every step.
    """

    name: str
    num_steps: int
    bit_equal: bool
    max_abs: float
    max_abs_step: int
    max_relative: float
    max_relative_step: int
    times_bound: float
    nearest_step: int
    bound: float
    first_different_step: int | None
    first_exceeding_step: int | None
    changes: tuple[tuple[int, float], ...] = ()
    is_estimate: bool = False
    is_zero: bool = False

    @property
    def is_judged(self) -> bool:
        """Whether anything bounds it at any step; equal bits always count."""
        return self.bit_equal or math.isfinite(self.bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricComparison:
    """All metrics, by name; ``steps``: logged by both runs; ``absent_steps``: as one run says it has none."""

    steps: tuple[int, ...]
    differences: tuple[MetricDifference, ...]
    findings: tuple[Finding, ...]
    absent_steps: tuple[AbsentSteps, ...] = ()

    @property
    def exceeding(self) -> tuple[MetricDifference, ...]:
        """Returns metrics beyond their bounds, by the first such step, then by name."""
        found = [(diff.first_exceeding_step, diff.name, diff) for diff in self.differences]
        return tuple(diff for step, _, diff in sorted(found, key=_by_step) if step is not None)

    @property
    def has_numbers(self) -> bool:
        """Whether a finite value of both runs was compared: NaN equals NaN, and proves nothing."""
        return any(diff.changes for diff in self.differences)

    @property
    def worst(self) -> MetricDifference | None:
        """The metric with the largest relative difference; ``None`` where nothing was compared."""
        return max(self.differences, key=lambda diff: diff.max_relative, default=None)


def load_run_metrics(run_dir: Path) -> MetricLog:
    """Reads the ``metrics.jsonl`` of a run as ``load_metrics``, and follows no link out of the run's folder."""
    return load_metrics(run_dir / METRICS_FILE, inside=run_dir)


def load_metrics(path: Path, *, inside: Path | None = None) -> MetricLog:
    """Reads a ``metrics.jsonl``; a last line that was not written to its end is passed over, with a warning.

    ``inside``: the folder that no link may lead out of; ``None``: the user named this file.

    Raises:
        TraceError: Anything but the format, with path and line.
    """

    def on_torn(num_bytes: int) -> None:
        logger.warning("%s: its last line was not written to its end; these %d bytes were passed over", path, num_bytes)

    try:
        lines = whole_lines(read_raw_lines(path, inside=inside), on_torn)
        return _parse_lines((line.decode("utf-8") for line in lines), path)
    except TraceError:  # which is an OSError as well
        raise
    except OSError as error:
        raise TraceError(describe_failure(error, f"{path}: metrics")) from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: metrics are not UTF-8: {error}") from error


def _parse_lines(lines: Iterable[str], path: Path) -> MetricLog:
    log: dict[int, dict[str, float]] = {}
    for number, line in enumerate(lines, start=1):
        step, metrics = _parse_line(line, where=f"{path}:{number}")
        if step in log:
            raise TraceError(f"{path}:{number}: step {step} is logged twice")
        log[step] = metrics
    return log


def is_comparable(name: str) -> bool:
    """Whether a metric must be the same in both runs."""
    return not name.startswith(NON_COMPARABLE_PREFIXES)


def compare_metrics(
    baseline: MetricLog, candidate: MetricLog, *, bounds: Bounds, selection: Selection = EVERYTHING
) -> MetricComparison:
    """Compares every comparable metric at every selected step; nothing on one side only is skipped."""
    baseline, candidate = (
        {step: metrics for step, metrics in log.items() if selection.has_step(step)} for log in (baseline, candidate)
    )
    steps = tuple(sorted(baseline.keys() & candidate.keys()))
    names = sorted({name for log in (baseline, candidate) for step in log.values() for name in step})
    missing, absent = split_missing_steps(baseline, candidate, selection, is_traced=False)
    findings = [_finding(step, f"step {step}", NotLogged(absent=side)) for step, side in missing]
    differences = []
    for name in filter(is_comparable, names):
        # What one side did not log cannot pass by being absent.
        findings += _find_missing_values(name, baseline, candidate, steps)
        shared = [step for step in steps if name in baseline[step] and name in candidate[step]]
        if shared:
            pairs = [(step, baseline[step][name], candidate[step][name]) for step in shared]
            differences.append(compare_values(name, pairs, bounds=bounds))
    return MetricComparison(steps=steps, differences=tuple(differences), findings=tuple(findings), absent_steps=absent)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """Holds one metric at one step."""

    step: int
    mine: float
    other: float
    limit: float
    absolute: float
    relative: float
    is_estimate: bool

    @classmethod
    def build(cls, step: int, mine: float, other: float, bound: MetricBound) -> _Row:
        absolute, relative = differ(mine, other, floor=bound.floor)
        # An infinite value would make a relative bound infinite too.
        limit = bound.limit(mine, other) if math.isfinite(absolute) else bound.absolute
        return cls(
            step=step,
            mine=mine,
            other=other,
            limit=limit,
            absolute=absolute,
            relative=relative,
            is_estimate=bound.is_estimate and math.isfinite(absolute),
        )

    @property
    def exceeds(self) -> bool:
        # An infinite difference is beyond any bound, an infinite one too.
        return self.absolute > self.limit or math.isinf(self.absolute)

    @property
    def times_bound(self) -> float:
        # 0 / 0 is 0 here: equal values keep every bound, and without a bound nothing is near it.
        if not self.absolute or math.isinf(self.limit):
            return 0.0
        return self.absolute / self.limit if self.limit else math.inf


def compare_values(name: str, pairs: Sequence[tuple[int, float, float]], *, bounds: Bounds) -> MetricDifference:
    """Compares one metric's ``(step, baseline, candidate)`` values; there must be at least one."""
    rows = [_Row.build(step, mine, other, bounds.metric(step, name)) for step, mine, other in pairs]
    largest = max(rows, key=lambda row: row.absolute)
    relative = max(rows, key=lambda row: row.relative)
    # With equal shares of their bounds, the step with the smallest bound says most.
    nearest = max(rows, key=lambda row: (row.times_bound, -row.limit))
    # By bits, though bounds are by value: equal bits are a proof, and a difference of 0.0 and -0.0 is a trace of one.
    different = [row.step for row in rows if not is_bit_equal(row.mine, row.other)]
    return MetricDifference(
        name=name,
        num_steps=len(rows),
        bit_equal=not different,
        max_abs=largest.absolute,
        max_abs_step=largest.step,
        max_relative=relative.relative,
        max_relative_step=relative.step,
        times_bound=nearest.times_bound,
        nearest_step=nearest.step,
        bound=nearest.limit,
        first_different_step=next(iter(different), None),
        first_exceeding_step=next((row.step for row in rows if row.exceeds), None),
        is_estimate=all(row.is_estimate for row in rows if row.exceeds),
        is_zero=all(row.mine == row.other == 0 for row in rows),
        changes=tuple((row.step, row.other - row.mine) for row in rows if math.isfinite(row.other - row.mine)),
    )


def differ(mine: float, other: float, *, floor: float) -> tuple[float, float]:
    """Returns the absolute and relative difference; both inf where only one is NaN, or infinities are not the same."""
    if mine == other or (math.isnan(mine) and math.isnan(other)):
        return 0.0, 0.0
    if not (math.isfinite(mine) and math.isfinite(other)):
        return math.inf, math.inf
    # Symmetric: neither run of a metric is a size the other could be measured by.
    absolute = abs(mine - other)
    return absolute, absolute / max(abs(mine), abs(other), floor)


def is_bit_equal(mine: float, other: float) -> bool:
    """Whether two values are equal to the last bit; any NaN equals any other, and 0 is not -0."""
    if math.isnan(mine) and math.isnan(other):
        return True
    # The bytes, since == takes 0 for -0.
    return struct.pack("<d", mine) == struct.pack("<d", other)


def _by_step(row: tuple[int | None, str, MetricDifference]) -> tuple[float, str]:
    step, name, _ = row
    return (math.inf if step is None else step, name)


def _parse_line(line: str, *, where: str) -> tuple[int, dict[str, float]]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON ({error.msg}); the run may have been cut off") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or lists too deep in each other
        raise TraceError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict) or type(row.get("step")) is not int or not isinstance(row.get("metrics"), dict):
        raise TraceError(f'{where}: expected {{"step": int, "metrics": {{name: number}}}}, found {shorten(line, 80)}')
    for name, value in row["metrics"].items():
        if not is_real(value) and not (isinstance(value, str) and value in _NON_FINITE):
            raise TraceError(
                f"{where}: metric {printable(name, limit=80)} is {shorten(repr(value), 80)}, expected a number"
            )
    return row["step"], {name: float(value) for name, value in row["metrics"].items()}


def _find_missing_values(name: str, baseline: MetricLog, candidate: MetricLog, steps: Sequence[int]) -> list[Finding]:
    """Finds at most one fault per side: the first step at which the metric is missing there, and at how many."""
    findings = []
    for present, have, lack in zip(SIDES, (baseline, candidate), (candidate, baseline), strict=True):
        missing = [step for step in steps if name in have[step] and name not in lack[step]]
        if missing:
            fact = NotLogged(absent=other_side(present), num_missing=len(missing), num_steps=len(steps))
            findings.append(_finding(missing[0], name, fact))
    return findings


def _finding(step: int, name: str, fact: NotLogged) -> Finding:
    return Finding(kind="metric", step=step, update=None, name=name, fact=fact)
