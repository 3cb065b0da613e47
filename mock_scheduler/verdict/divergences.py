"""Lists everything beyond its bound, in the order of computation: by step; then update by update, phase by phase.

Once rounding has turned a decision (``expert_bias``), the two runs go on from parameters that are a whole step apart;
once two precisions have stored an update, from parameters that each rounded in its own way. No bound was measured from
there: later excesses are beyond an estimate only. Metrics are means over a step's updates and counters, which
recomputation may count twice and one side alone may log: they stand behind all tensors of the step, from which nothing
is computed. A norm stands where it is used, between gradients and parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mock_scheduler.comparison.findings import DifferenceKind, Finding, OtherNorm
from mock_scheduler.comparison.pairing.order import BOOKKEEPING, order_keys, phase_of
from mock_scheduler.comparison.residuals import Locality, Residual
from mock_scheduler.comparison.tensors import LedgerComparison, TensorComparison, TensorDifference, WorstElement
from mock_scheduler.comparison.walk.metrics import MetricComparison, MetricDifference
from mock_scheduler.config.instruments import TRACE_KINDS
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.recording.inspection.comparison import ContractDifference, StepDifference
from mock_scheduler.support.text import printable
from mock_scheduler.trace.entries import PHASES, Phase, TraceKey
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.trace.names import GRADIENT_NORM

#: Calls are told apart by their order alone, which belongs to the whole step.
_PHASES: dict[DifferenceKind, int] = {
    **{kind: PHASES[kind] for kind in TRACE_KINDS},
    "metric": BOOKKEEPING,
    "step": Phase.START - 3,
    "recording": Phase.START - 2,
    "rows": Phase.START - 1,
    "ledger": BOOKKEEPING + 1,
}
_FIRST_IN_STEP: frozenset[DifferenceKind] = frozenset({"step", "recording", "rows"})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsOfOneSide:
    """Steps of one folder in one of two recordings alone; ``side``: its name."""

    side: str
    folder: str
    steps: StepRanges


Evidence = (
    TensorDifference
    | MetricDifference
    | ReplicaConflict
    | Finding
    | LedgerComparison
    | ContractDifference
    | StepsOfOneSide
    | StepDifference
)
"""The comparison that shows a divergence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """Holds the compared tensors before a divergence: how many, how many equal, how many no larger than noise."""

    num_compared: int
    num_equal: int
    num_unjudged: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """Holds one difference beyond its bound.

    Args:
        update: ``None`` for metrics, calls and recordings.
        evidence: The comparison behind it.
        value: The largest difference, relative for tensors and metrics; ``None`` where there is no number (missing,
            another shape, NaN).
        bound: The bound of ``value``; 0 for replicas; ``None`` where there is no number, and for metrics.
        own_residual: The look of a difference beside the baseline, where replicas disagree.
        is_selection: As in a ``Finding``.
        is_estimate: Its bound was extrapolated, or rounding turned a decision in an update before.
        before: The tensors before it; ``None`` where they were not counted.
    """

    step: int
    update: int | None
    kind: DifferenceKind
    name: str
    evidence: Evidence
    value: float | None = None
    bound: float | None = None
    own_residual: Residual | None = None
    is_selection: bool = False
    is_estimate: bool = False
    before: Before | None = None

    @property
    def place(self) -> tuple[int, int | None, DifferenceKind, str]:
        """Step, update, kind and name."""
        return self.step, self.update, self.kind, self.name

    @property
    def difference(self) -> TensorDifference | None:
        """Returns the figures of a shared tensor."""
        return self.evidence if isinstance(self.evidence, TensorDifference) else None

    @property
    def worst(self) -> WorstElement | None:
        """Returns the element with the largest difference: its index, sample, token and ranks."""
        figures = None if self.difference is None else self.difference.figures
        return None if figures is None else figures.worst

    @property
    def residual(self) -> Residual | None:
        """Returns the look of the difference."""
        return self.own_residual if self.difference is None else self.difference.residual

    @property
    def locality(self) -> Locality | None:
        """Where in the tensor the difference is concentrated most."""
        localities = () if self.difference is None else self.difference.localities
        return localities[0] if localities else None

    def __str__(self) -> str:
        """Returns ``gradient of output_layer.weight at step 0, update 0``; ``metric pg_loss at step 3``."""
        if self.kind in TRACE_KINDS:
            return printable(_certain_key(self).describe())
        return printable(f"{self.kind} {self.name} at step {self.step}")


def find_divergences(metrics: MetricComparison | None, tensors: TensorComparison | None) -> list[Divergence]:
    """Returns everything beyond its bound, in the order of computation (see the module's docstring)."""
    found: list[Divergence] = []
    last_update: dict[int, int] = {}
    if tensors is not None:
        found += _list_of_tensors(tensors)
        for difference in tensors.differences:
            key = difference.key
            last_update[key.step] = max(key.update, last_update.get(key.step, 0))
    if metrics is not None:
        found += [from_finding(finding) for finding in metrics.findings]
        found += [from_metric(difference) for difference in metrics.exceeding]
    # Within a phase the modules' own order decides, the same as for compared tensors.
    keys = {_trace_key(item) for item in found} - {None}
    position = {key: index for index, key in enumerate(order_keys(key for key in keys if key is not None))}

    def time(item: Divergence) -> tuple[int, int]:
        # Rows and contracts come before all of their step; metrics and calls stand with its last update.
        if item.update is not None:
            return item.step, item.update
        # A metric of a step does not tell which update's norm is wrong; the first's clip would be by it.
        return item.step, 0 if item.kind in _FIRST_IN_STEP or _is_other_norm(item) else last_update.get(item.step, 0)

    first = None if tensors is None else tensors.last_measured
    if first is not None:
        # From the update after it on, no bound was measured for these parameters.
        found = [replace(item, is_estimate=True) if _is_amount(item) and time(item) > first else item for item in found]

    def place(item: Divergence) -> tuple[int, int, int, int, str]:
        key = _trace_key(item)
        return *time(item), _phase_of(item, key), position[key] if key is not None else 0, item.name

    return sorted(found, key=place)


def _phase_of(item: Divergence, key: TraceKey | None) -> int:
    if key is not None:
        return phase_of(key)
    # Gradients are clipped by a norm, so that parameters follow from it.
    is_norm = item.kind == "metric" and item.name.endswith(GRADIENT_NORM) and item.value is not None
    return Phase.NORM if is_norm or _is_other_norm(item) else _PHASES[item.kind]


def _is_other_norm(item: Divergence) -> bool:
    return isinstance(item.evidence, Finding) and isinstance(item.evidence.fact, OtherNorm)


def earlier(first: Divergence | None, law: Divergence) -> Divergence:
    """Returns the earlier one of a divergence and a tensor that breaks a law of the candidate's own run."""
    if first is None:
        return law
    key, own = _trace_key(first), _certain_key(law)
    if key is None:
        return first if first.kind in _FIRST_IN_STEP or first.step < law.step else law
    return first if order_keys([key, own])[0] == key else law


def count_before(first: Divergence, tensors: TensorComparison | None) -> Divergence:
    """The divergence with the count of tensors before it; unchanged where it is no tensor."""
    if first.kind not in TRACE_KINDS or tensors is None:
        return first
    own = _certain_key(first)
    # A finding is none of the compared tensors, so its key is ordered among theirs.
    place = order_keys([item.key for item in tensors.differences] + [own]).index(own)
    before = tensors.differences[:place]
    counted = Before(
        num_compared=len(before),
        num_equal=sum(item.bit_equal for item in before),
        num_unjudged=sum(not item.is_judged for item in before),
    )
    return replace(first, before=counted)


def from_metric(difference: MetricDifference) -> Divergence:
    """A metric beyond its bound, at the first step where it is."""
    step = difference.first_exceeding_step
    assert step is not None
    return Divergence(
        step=step,
        update=None,
        kind="metric",
        name=difference.name,
        evidence=difference,
        value=difference.max_relative,
        is_estimate=difference.is_estimate,
    )


def _list_of_tensors(tensors: TensorComparison) -> list[Divergence]:
    residuals = {item.key: item.residual for item in tensors.exceeding}
    conflicts = [from_conflict(item, residuals.get(item.key)) for item in tensors.candidate_conflicts]
    # Copies that differ say why a tensor is wrong, unless one is NaN, which its finding says better.
    found = [item for item in conflicts if item.value is not None and math.isfinite(item.value)]
    found += [from_finding(finding) for finding in tensors.findings]
    found += [item for item in conflicts if item.value is None or not math.isfinite(item.value)]
    found += [from_tensor(difference) for difference in tensors.exceeding]
    return found + [
        Divergence(step=ledger.step, update=None, kind="ledger", name=ledger.kind, evidence=ledger)
        for ledger in tensors.ledgers
        if ledger.difference is not None
    ]


def _is_amount(item: Divergence) -> bool:
    """Whether a size is beyond a bound: an estimate may excuse it, but no contradiction within one run."""
    return item.value is not None and (item.kind == "metric" or item.difference is not None)


def from_finding(finding: Finding) -> Divergence:
    """Returns a difference without a number."""
    return Divergence(
        step=finding.step,
        update=finding.update,
        kind=finding.kind,
        name=finding.name,
        evidence=finding,
        is_selection=finding.is_selection,
    )


def from_conflict(conflict: ReplicaConflict, residual: Residual | None = None) -> Divergence:
    """Copies of one run that differ; ``residual``: the look of their difference from the baseline."""
    key = conflict.key
    return Divergence(
        step=key.step,
        update=key.update,
        kind=key.kind,
        name=key.name,
        evidence=conflict,
        value=conflict.max_abs,
        bound=0.0,
        own_residual=residual,
    )


def from_tensor(difference: TensorDifference) -> Divergence:
    """Returns a tensor beyond its tolerance."""
    key = difference.key
    return Divergence(
        step=key.step,
        update=key.update,
        kind=key.kind,
        name=key.name,
        evidence=difference,
        value=difference.relative,
        bound=difference.tolerance,
        is_estimate=difference.is_estimate,
    )


def _trace_key(item: Divergence) -> TraceKey | None:
    return _certain_key(item) if item.kind in TRACE_KINDS else None


def _certain_key(item: Divergence) -> TraceKey:
    assert item.kind in TRACE_KINDS
    return TraceKey(step=item.step, update=item.update or 0, kind=item.kind, name=item.name)
