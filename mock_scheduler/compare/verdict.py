"""From the differences of two runs to one verdict with its reason.

``identical``: every metric, gradient and parameter is bit-equal, and so are all replicas. ``rounding``: none is beyond
the stated tolerance. ``diverged``: something is, or is missing on one side, or replicas disagree that agree in the
baseline. ``incomparable``: metrics, gradients or parameters could not be compared at all; equal losses alone prove
nothing. ``unverified``: the run could not show that it is deterministic.

The first divergence is the earliest in the order of computation: by step; then update by update its gradients and its
parameters; within each, from the embedding to the output. Metrics are means over a step's updates, so they are placed
with the last one, between its gradients and its parameters. Metrics beyond tolerance are always listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mock_scheduler.compare.findings import DifferenceKind, Finding
from mock_scheduler.compare.metrics import MetricComparison, MetricDifference
from mock_scheduler.compare.tensors import (
    JUDGED_KINDS,
    TensorComparison,
    TensorDifference,
    TensorGroup,
    execution_order,
)
from mock_scheduler.config.schema import ToleranceConfig
from mock_scheduler.errors import ExitCode
from mock_scheduler.text import count_of
from mock_scheduler.trace.kinds import PHASES, TRACE_KINDS, Phase
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
#: A metric is a mean over a step's updates; it stands with the last one, behind its gradients.
_PHASES: dict[DifferenceKind, int] = {**{kind: PHASES[kind] for kind in TRACE_KINDS}, "metric": Phase.NORM}


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
    found += [_from_conflict(conflict) for conflict in tensors.candidate_conflicts]
    found += [_from_tensor(difference) for difference in tensors.exceeding]
    found += [_from_metric(difference, tolerance) for difference in metrics.exceeding]
    names = execution_order({divergence.name for divergence in found})
    position = {name: index for index, name in enumerate(names)}
    last_update: dict[int, int] = {}
    for difference in tensors.differences:
        last_update[difference.key.step] = max(difference.key.update, last_update.get(difference.key.step, 0))

    def place(item: Divergence) -> tuple[int, int, int, int]:
        update = last_update.get(item.step, 0) if item.update is None else item.update
        return item.step, update, _PHASES[item.kind], position[item.name]

    return sorted(found, key=place)


def worst_exit_code(verdicts: list[Verdict]) -> ExitCode:
    """The gravest exit code: diverged, then incomparable, then unverified, then aligned."""
    gravest_first = (Verdict.DIVERGED, Verdict.INCOMPARABLE, Verdict.UNVERIFIED)
    return next((verdict.exit_code for verdict in gravest_first if verdict in verdicts), ExitCode.ALIGNED)


def describe_coverage(metrics: MetricComparison, tensors: TensorComparison) -> str:
    """What was compared, and the worst of each kind with its margin; for a verdict that passes."""
    parts = [f"{count_of(len(metrics.differences), 'metric')} over {count_of(len(metrics.steps), 'step')}"]
    for kind in JUDGED_KINDS:
        group = tensors.group(kind)
        if group is not None:
            parts.append(f"{count_of(group.num_compared, kind)}{_describe_worst(group)}")
    return ", ".join(parts)


def _judge(
    metrics: MetricComparison, tensors: TensorComparison, first: Divergence | None, tolerance: ToleranceConfig
) -> tuple[Verdict, str]:
    unusable = tensors.unusable[0] if tensors.unusable else None
    if unusable and (first is None or (first.step, first.update or 0) >= (unusable.step, unusable.update or 0)):
        return Verdict.INCOMPARABLE, f"both runs are broken, so neither is a reference: {unusable.message}"
    missing = _not_compared(metrics, tensors)
    if first is None and missing:
        return Verdict.INCOMPARABLE, f"no {' and no '.join(missing)} was compared: the rest proves nothing"
    if len(missing) == 1 + len(JUDGED_KINDS):
        return Verdict.INCOMPARABLE, f"nothing was compared: {first.message}" if first else "nothing was compared"
    if first is not None:
        return Verdict.DIVERGED, _describe_divergence(first, metrics, tensors, tolerance)
    idle = _describe_idle(tensors)
    if idle:
        return Verdict.INCOMPARABLE, idle
    if tensors.baseline_conflicts:
        conflict = tensors.baseline_conflicts[0].describe()
        return Verdict.INCOMPARABLE, f"replicas disagree in the baseline, so it is no reference: {conflict}"
    bit_equal = all(metric.bit_equal for metric in metrics.differences) and all(
        tensor.bit_equal for tensor in tensors.differences
    )
    coverage = describe_coverage(metrics, tensors)
    if bit_equal:
        return Verdict.IDENTICAL, f"bit-equal: {coverage}"
    return Verdict.ROUNDING, f"within tolerance: {coverage}"


def _not_compared(metrics: MetricComparison, tensors: TensorComparison) -> list[str]:
    missing = [] if metrics.differences else ["metric"]
    return missing + [kind for kind in JUDGED_KINDS if tensors.group(kind) is None]


def _describe_idle(tensors: TensorComparison) -> str:
    """Why the runs trained nothing that could be compared; empty where they did."""
    gradients, changes = (
        [item for item in tensors.differences if item.key.kind == kind] for kind in ("gradient", "parameter")
    )
    if all(item.is_zero for item in gradients):
        return (
            "nothing was trained: every gradient of the baseline is 0, so any change would look equal; align on "
            "rollouts whose rewards differ within a group, or with an entropy or KL term"
        )
    if all(item.is_zero for item in changes):
        return "nothing was trained: no update of the baseline changed a parameter, so any change would look equal"
    if not any(item.is_judged for item in changes):
        return (
            "no parameter was judged: every update changes less than parameters can be stored with; raise training.lr"
        )
    return ""


def _describe_divergence(
    first: Divergence, metrics: MetricComparison, tensors: TensorComparison, tolerance: ToleranceConfig
) -> str:
    parts = [f"first divergence: {first.message}"]
    if metrics.exceeding and first.kind != "metric":
        parts.append(f"first metric: {_from_metric(metrics.exceeding[0], tolerance).message}")
    parts.append(
        f"beyond tolerance: {len(metrics.exceeding)} of {count_of(len(metrics.differences), 'metric')}, "
        f"{len(tensors.exceeding)} of {count_of(len(tensors.differences), 'tensor')}"
    )
    num_findings = len(metrics.findings) + len(tensors.findings)
    if num_findings:
        parts.append(f"{num_findings} could not be compared")
    if tensors.candidate_conflicts:
        parts.append(f"replicas disagree: {tensors.candidate_conflicts[0].describe()}")
    if _grew_gradually(first, tensors):
        parts.append(
            "it grew over the updates before, as rounding does that training amplifies; to tell it from a fault, align "
            "fewer steps"
        )
    return "; ".join(dict.fromkeys(parts))


def _grew_gradually(first: Divergence, tensors: TensorComparison) -> bool:
    """Whether the first tensor beyond its tolerance was near it at the update before, and not at the first one."""
    series = [item for item in tensors.differences if (item.key.kind, item.key.name) == (first.kind, first.name)]
    before = [item for item in series if (item.key.step, item.key.update) < (first.step, first.update or 0)]
    if not before or first.value is None or first.tolerance == 0:
        return False
    return before[-1].relative > 0.03 * before[-1].tolerance and before[0].relative < 0.1 * before[-1].relative


def _describe_worst(group: TensorGroup) -> str:
    if group.num_bit_equal == group.num_compared:
        return ""
    worst = group.worst
    if worst.relative == 0:
        return (
            f" ({group.num_bit_equal} bit-equal; the others within the rounding of storing{_describe_excluded(group)})"
        )
    return (
        f" ({group.num_bit_equal} bit-equal; worst {worst.key.name} at step {worst.key.step}: "
        f"{worst.relative:.2e}, {_describe_margin(worst.margin)} times below {worst.tolerance:.2g}"
        f"{_describe_excluded(group)})"
    )


def _describe_excluded(group: TensorGroup) -> str:
    """How much had no say: elements whose gradients are rounding, and tensors that are too small to be judged."""
    excluded = f"; {group.fraction_excluded:.2%} of elements left out" if group.fraction_excluded else ""
    unjudged = f"; {group.num_unjudged} not judged, being no larger than rounding" if group.num_unjudged else ""
    return excluded + unjudged


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
        message=f"{key.describe()}: relative difference {difference.relative:.3g} > {difference.tolerance:.2g}",
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
