"""Everything beyond its bound, in the order of computation: by step; then update by update, phase by phase.

Once rounding has turned a decision (``decisions``), the two runs go on from parameters that are a whole step apart, of
which no bound was measured: what is beyond its bound in the updates behind it is beyond an estimate only. Metrics are
means over a step's updates, so they are placed with the last one, between its gradients and its parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mock_scheduler.compare.findings import DifferenceKind, Finding
from mock_scheduler.compare.pairing.order import order_keys
from mock_scheduler.compare.residuals import Residual
from mock_scheduler.compare.tensors import LedgerComparison, TensorComparison, TensorDifference
from mock_scheduler.compare.walk.metrics import MetricComparison, MetricDifference
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.trace.kinds import PHASES, TRACE_KINDS, Phase
from mock_scheduler.verdict.sentence import describe_before, describe_tensor, name_place
from mock_scheduler.verdict.wording.findings import describe_finding, describe_ledger
from mock_scheduler.verdict.wording.residuals import describe_residual

#: A metric is a mean over a step's updates; it stands with the last one, behind its gradients. Calls are told apart by
#: their order alone, which belongs to the whole step.
_PHASES: dict[DifferenceKind, int] = {
    **{kind: PHASES[kind] for kind in TRACE_KINDS},
    "metric": Phase.NORM,
    "step": Phase.START - 3,
    "recording": Phase.START - 2,
    "rows": Phase.START - 1,
    "ledger": Phase.UPDATE + 1,
}
_FIRST_IN_STEP: frozenset[DifferenceKind] = frozenset({"step", "recording", "rows"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """One difference beyond its bound.

    ``update`` is ``None`` for metrics. ``value`` and ``tolerance`` are ``None`` where there is no number (missing,
    another shape, NaN); for replicas, ``value`` is the largest difference and ``tolerance`` 0.
    ``message``: in words. ``difference``: of a tensor that both runs have, all that its comparison found.
    ``is_selection``: as of a ``Finding``. ``is_estimate``: its bound was extrapolated, or rounding turned a decision in
    an update before.
    """

    step: int
    update: int | None
    kind: DifferenceKind
    name: str
    value: float | None
    tolerance: float | None
    message: str
    difference: TensorDifference | None = None
    is_selection: bool = False
    is_estimate: bool = False

    @property
    def place(self) -> tuple[int, int | None, DifferenceKind, str]:
        """Step, update, kind and name."""
        return self.step, self.update, self.kind, self.name


def find_divergences(metrics: MetricComparison | None, tensors: TensorComparison | None) -> list[Divergence]:
    """Everything beyond its bound, in the order of computation that the module's docstring explains."""
    found: list[Divergence] = []
    last_update: dict[int, int] = {}
    if tensors is not None:
        residuals = {item.key: item.residual for item in tensors.exceeding}
        conflicts = [_from_conflict(item, residuals.get(item.key)) for item in tensors.candidate_conflicts]
        # Copies that differ say why a tensor is wrong, unless one is NaN, which its finding says better.
        found += [item for item in conflicts if item.value is not None and math.isfinite(item.value)]
        found += [_from_finding(finding) for finding in tensors.findings]
        found += [item for item in conflicts if item.value is None or not math.isfinite(item.value)]
        found += [_from_tensor(difference) for difference in tensors.exceeding]
        found += [_from_ledger(ledger) for ledger in tensors.ledgers if ledger.difference is not None]
        for difference in tensors.differences:
            key = difference.key
            last_update[key.step] = max(key.update, last_update.get(key.step, 0))
    if metrics is not None:
        found += [_from_finding(finding) for finding in metrics.findings]
        found += [from_metric(difference) for difference in metrics.exceeding]
    keys = {_trace_key(item) for item in found} - {None}
    position = {key: index for index, key in enumerate(order_keys(key for key in keys if key is not None))}

    def time(item: Divergence) -> tuple[int, int]:
        if item.update is not None:
            return item.step, item.update
        return item.step, 0 if item.kind in _FIRST_IN_STEP else last_update.get(item.step, 0)

    flipped = () if tensors is None else tensors.flipped_decisions
    if flipped:
        first = min((item.key.step, item.key.update) for item in flipped)
        found = [replace(item, is_estimate=True) if _is_amount(item) and time(item) > first else item for item in found]

    def place(item: Divergence) -> tuple[int, int, int, int, str]:
        key = _trace_key(item)
        return *time(item), _PHASES[item.kind], position[key] if key is not None else 0, item.name

    return sorted(found, key=place)


def _is_amount(item: Divergence) -> bool:
    """Whether it is by how much two runs differ that is beyond a bound, and no contradiction within one of them."""
    return item.value is not None and (item.kind == "metric" or item.difference is not None)


def describe_divergence(first: Divergence, tensors: TensorComparison | None) -> str:
    """The first divergence as one sentence."""
    if first.kind not in TRACE_KINDS or tensors is None:
        return first.message
    where = name_place(first.step, first.update, first.kind)
    ordered = order_keys([item.key for item in tensors.differences] + [_certain_key(first)])
    before = describe_before(tensors, first.difference, ordered.index(_certain_key(first)))
    return f"{where}: {first.message}; {before}"


def _from_finding(finding: Finding) -> Divergence:
    return Divergence(
        step=finding.step,
        update=finding.update,
        kind=finding.kind,
        name=finding.name,
        value=None,
        tolerance=None,
        message=describe_finding(finding),
        is_selection=finding.is_selection,
    )


def _from_conflict(conflict: ReplicaConflict, residual: Residual | None) -> Divergence:
    key = conflict.key
    looks_like = "" if residual is None else f": {describe_residual(residual)}"
    return Divergence(
        step=key.step,
        update=key.update,
        kind=key.kind,
        name=key.name,
        value=conflict.max_abs,
        tolerance=0.0,
        message=f"copies within the candidate differ: {conflict.describe()}{looks_like}",
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
        message=describe_tensor(difference),
        difference=difference,
        is_estimate=difference.is_estimate,
    )


def _from_ledger(ledger: LedgerComparison) -> Divergence:
    return Divergence(
        step=ledger.step,
        update=None,
        kind="ledger",
        name=ledger.kind,
        value=None,
        tolerance=None,
        message=describe_ledger(ledger),
    )


def _trace_key(item: Divergence) -> TraceKey | None:
    return _certain_key(item) if item.kind in TRACE_KINDS else None


def _certain_key(item: Divergence) -> TraceKey:
    assert item.kind in TRACE_KINDS
    return TraceKey(step=item.step, update=item.update or 0, kind=item.kind, name=item.name)


def from_metric(difference: MetricDifference) -> Divergence:
    """A metric beyond its bound, at the first step where it is."""
    step = difference.first_exceeding_step
    assert step is not None
    return Divergence(
        step=step,
        update=None,
        kind="metric",
        name=difference.name,
        value=difference.max_relative,
        tolerance=None,
        message=(
            f"{difference.name} from step {step} on: relative difference up to {difference.max_relative:.3g}, "
            f"|a-b| {difference.times_bound:.3g} times its bound of {difference.bound:.2g} at step "
            f"{difference.nearest_step}"
        ),
        is_estimate=difference.is_estimate,
    )
