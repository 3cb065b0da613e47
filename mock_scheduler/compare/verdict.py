"""From the differences of two runs to one verdict with its reason.

``identical``: every metric, gradient and parameter is bit-equal, and so are all replicas. ``rounding``: none is beyond
the stated tolerance. ``diverged``: something is, or is missing on one side, or replicas disagree that agree in the
baseline. ``incomparable``: metrics, gradients or parameters could not be compared at all; equal losses alone prove
nothing. ``unverified``: the run could not show that it is deterministic.

The first divergence is the earliest in the order of computation: by step; then update by update, its gradients, the
step's metrics (logged over all updates, so placed with the first), its parameters; within each, from the embedding
to the output. Gradients come before metrics since they name the place; metrics beyond tolerance are always listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mock_scheduler.compare.findings import DifferenceKind, Finding
from mock_scheduler.compare.metrics import MetricComparison, MetricDifference
from mock_scheduler.compare.tensors import TensorComparison, TensorDifference, TensorGroup, execution_order
from mock_scheduler.config.schema import ToleranceConfig
from mock_scheduler.errors import ExitCode
from mock_scheduler.trace.files import TRACE_KINDS
from mock_scheduler.trace.reader import ReplicaConflict


class Verdict(StrEnum):
    """What a candidate is to its baseline."""

    IDENTICAL = "identical"
    ROUNDING = "rounding"
    DIVERGED = "diverged"
    INCOMPARABLE = "incomparable"
    UNVERIFIED = "unverified"

    @property
    def exit_code(self) -> ExitCode:
        """What a command that ends with this verdict exits with."""
        return _EXIT_CODES[self]


_EXIT_CODES = {
    Verdict.IDENTICAL: ExitCode.ALIGNED,
    Verdict.ROUNDING: ExitCode.ALIGNED,
    Verdict.DIVERGED: ExitCode.DIVERGED,
    Verdict.INCOMPARABLE: ExitCode.INCOMPARABLE,
    Verdict.UNVERIFIED: ExitCode.UNVERIFIED,
}
_PHASES: dict[DifferenceKind, int] = {"gradient": 0, "metric": 1, "parameter": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """One difference beyond its bound.

    ``update`` is ``None`` for metrics. ``value`` and ``tolerance`` are ``None`` where there is no number (missing,
    another shape, NaN); for replicas, ``value`` is the largest difference and ``tolerance`` 0.
    """

    step: int
    update: int | None
    kind: DifferenceKind
    name: str
    value: float | None
    tolerance: float | None
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """The verdict on one candidate; the comparisons are ``None`` where its run failed."""

    verdict: Verdict
    reason: str
    first_divergence: Divergence | None
    metrics: MetricComparison | None
    tensors: TensorComparison | None


def decide(metrics: MetricComparison, tensors: TensorComparison, *, tolerance: ToleranceConfig) -> Alignment:
    """The verdict on what was compared."""
    divergences = find_divergences(metrics, tensors, tolerance=tolerance)
    first = divergences[0] if divergences else None
    verdict, reason = _judge(metrics, tensors, first, tolerance)
    return Alignment(verdict=verdict, reason=reason, first_divergence=first, metrics=metrics, tensors=tensors)


def failed_run(verdict: Verdict, reason: str) -> Alignment:
    """The verdict on a candidate whose run, or whose files, left nothing to compare."""
    return Alignment(verdict=verdict, reason=reason, first_divergence=None, metrics=None, tensors=None)


def find_divergences(
    metrics: MetricComparison, tensors: TensorComparison, *, tolerance: ToleranceConfig
) -> list[Divergence]:
    """Everything beyond its bound, in the order of computation that the module's docstring explains."""
    found = [_from_finding(finding) for finding in (*metrics.findings, *tensors.findings)]
    found += [_from_conflict(conflict) for conflict in tensors.new_conflicts]
    found += [_from_tensor(difference) for difference in tensors.exceeding]
    found += [_from_metric(difference, tolerance) for difference in metrics.exceeding]
    names = execution_order({divergence.name for divergence in found})
    position = {name: index for index, name in enumerate(names)}
    return sorted(found, key=lambda item: (item.step, item.update or 0, _PHASES[item.kind], position[item.name]))


def worst_exit_code(verdicts: list[Verdict]) -> ExitCode:
    """The gravest exit code: diverged, then incomparable, then unverified, then aligned."""
    gravest_first = (Verdict.DIVERGED, Verdict.INCOMPARABLE, Verdict.UNVERIFIED)
    return next((verdict.exit_code for verdict in gravest_first if verdict in verdicts), ExitCode.ALIGNED)


def describe_coverage(metrics: MetricComparison, tensors: TensorComparison) -> str:
    """What was compared, and the worst of each kind with its margin; for a verdict that passes."""
    parts = [f"{_count(len(metrics.differences), 'metric')} over {_count(len(metrics.steps), 'step')}"]
    for kind in TRACE_KINDS:
        group = tensors.group(kind)
        if group is not None:
            parts.append(f"{_count(group.num_compared, kind)}{_describe_worst(group)}")
    return ", ".join(parts)


def _judge(
    metrics: MetricComparison, tensors: TensorComparison, first: Divergence | None, tolerance: ToleranceConfig
) -> tuple[Verdict, str]:
    missing = _not_compared(metrics, tensors)
    if first is None and missing:
        return Verdict.INCOMPARABLE, f"no {' and no '.join(missing)} was compared: the rest proves nothing"
    if len(missing) == 1 + len(TRACE_KINDS):
        return Verdict.INCOMPARABLE, f"nothing was compared: {first.message}" if first else "nothing was compared"
    if first is not None:
        return Verdict.DIVERGED, _describe_divergence(first, metrics, tensors, tolerance)
    conflicts = (*tensors.baseline_conflicts, *tensors.candidate_conflicts)
    bit_equal = all(metric.bit_equal for metric in metrics.differences) and all(
        tensor.bit_equal for tensor in tensors.differences
    )
    coverage = describe_coverage(metrics, tensors)
    if bit_equal and not conflicts:
        return Verdict.IDENTICAL, f"bit-equal: {coverage}"
    if conflicts:
        coverage += f"; but replicas disagree in the baseline too: {conflicts[0].describe()}"
    return Verdict.ROUNDING, f"within tolerance: {coverage}"


def _not_compared(metrics: MetricComparison, tensors: TensorComparison) -> list[str]:
    missing = [] if metrics.differences else ["metric"]
    return missing + [kind for kind in TRACE_KINDS if tensors.group(kind) is None]


def _describe_divergence(
    first: Divergence, metrics: MetricComparison, tensors: TensorComparison, tolerance: ToleranceConfig
) -> str:
    parts = [f"first divergence: {first.message}"]
    if metrics.exceeding and first.kind != "metric":
        parts.append(f"first metric: {_from_metric(metrics.exceeding[0], tolerance).message}")
    parts.append(
        f"beyond tolerance: {len(metrics.exceeding)} of {_count(len(metrics.differences), 'metric')}, "
        f"{len(tensors.exceeding)} of {_count(len(tensors.differences), 'tensor')}"
    )
    num_findings = len(metrics.findings) + len(tensors.findings)
    if num_findings:
        parts.append(f"{num_findings} could not be compared")
    if tensors.new_conflicts:
        parts.append(f"replicas disagree: {tensors.new_conflicts[0].describe()}")
    return "; ".join(dict.fromkeys(parts))


def _describe_worst(group: TensorGroup) -> str:
    if group.num_bit_equal == group.num_compared:
        return ""
    worst = group.worst
    return (
        f" ({group.num_bit_equal} bit-equal; worst {worst.key.name} at step {worst.key.step}: relF "
        f"{worst.relative:.2e}, {_describe_margin(worst.margin)} times below {worst.tolerance:g})"
    )


def _describe_margin(margin: float) -> str:
    return f"{margin:,.0f}" if margin >= 10 else f"{margin:.1f}"


def _from_finding(finding: Finding) -> Divergence:
    return Divergence(
        step=finding.step,
        update=finding.update,
        kind=finding.kind,
        name=finding.name,
        value=None,
        tolerance=None,
        message=finding.message,
    )


def _from_conflict(conflict: ReplicaConflict) -> Divergence:
    key = conflict.key
    return Divergence(
        step=key.step,
        update=key.update,
        kind=key.kind,
        name=key.name,
        value=conflict.max_abs,
        tolerance=0.0,
        message=conflict.describe(),
    )


def _from_tensor(difference: TensorDifference) -> Divergence:
    key = difference.key
    return Divergence(
        step=key.step,
        update=key.update,
        kind=key.kind,
        name=key.name,
        value=difference.relative,
        tolerance=difference.tolerance,
        message=f"{key.describe()}: relF {difference.relative:.3g} > {difference.tolerance:g}",
    )


def _from_metric(difference: MetricDifference, tolerance: ToleranceConfig) -> Divergence:
    step = difference.first_exceeding_step
    assert step is not None
    return Divergence(
        step=step,
        update=None,
        kind="metric",
        name=difference.name,
        value=difference.max_relative,
        tolerance=tolerance.metric,
        message=(
            f"{difference.name} from step {step} on: relative difference up to {difference.max_relative:.3g} "
            f"> {tolerance.metric:g}"
        ),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
