"""How far a verdict reaches: the tensor nearest to its bound, the smallest error it would find, its limits and causes.

Contract: pure; facts of a comparison, ``wording`` makes sentences of them, and reports make JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mock_scheduler.comparison.findings import AbsentSteps, Note, NotShown
from mock_scheduler.comparison.noise.judging import first_hidden_step
from mock_scheduler.comparison.pairing.selection import EVERYTHING, Selection
from mock_scheduler.comparison.tensors import JUDGED_KINDS, ExpertFlips, TensorComparison, TensorDifference
from mock_scheduler.comparison.thresholds import GREW_TENFOLD, NEARLY_BEYOND
from mock_scheduler.comparison.walk.metrics import MetricComparison, MetricDifference
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.divergences import Divergence

#: What modules compute.
_OUTPUT_KINDS: frozenset[TraceKind] = frozenset({"activation", "router", "logits", "output"})


def find_nearest(tensors: TensorComparison | None) -> TensorDifference | None:
    """The tensor nearest to its bound, or furthest beyond it; ``None`` where no judged tensor differs."""
    differences = () if tensors is None else tensors.differences
    # Tensors no larger than noise have no margin: their distance says nothing.
    apart = [item for item in differences if not item.bit_equal and item.is_judged]
    return min(apart, key=lambda item: item.margin, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallestError:
    """The smallest errors in the sight of a verdict of equality: anything larger would be a divergence.

    Args:
        bounds: The largest relative bound of each kind of tensor.
        num_without_size: Tensors of zeros in the baseline: no error could be relative to them.
        nearest_metric: The metric nearest to its bound; ``None`` where no judged metric differs.
    """

    bounds: Mapping[TraceKind, float]
    num_without_size: int
    nearest_metric: MetricDifference | None


def find_smallest_error(metrics: MetricComparison | None, tensors: TensorComparison | None) -> SmallestError:
    """The smallest detectable errors, by kind; metrics have bounds of their own at every step."""
    bounds: dict[TraceKind, float] = {}
    num_without_size = 0
    for kind in tensors.kinds if tensors is not None else ():
        assert tensors is not None
        of_kind = (item for item in tensors.differences if item.key.kind == kind and item.is_judged)
        # The bound of turned decisions is a number of elements, not a size.
        judged = [item for item in of_kind if not item.num_decisions]
        # An infinite bound is that of a tensor of zeros: nothing is relative to it.
        num_without_size += sum(math.isinf(item.tolerance) for item in judged)
        bounded = [item.tolerance for item in judged if item.is_bounded]
        if bounded:
            bounds[kind] = max(bounded)
    differing = [item for item in metrics.differences if item.is_judged and not item.bit_equal] if metrics else []
    nearest = max(differing, key=lambda item: item.times_bound, default=None)
    return SmallestError(bounds=bounds, num_without_size=num_without_size, nearest_metric=nearest)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnedDecisions:
    """How many elements of updates rounding turned up or down, of ``num_decisions``; ``first``: where."""

    num_turned: int
    num_decisions: int
    first: TensorDifference


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of a verdict; ``hidden_from_step``: noise hides all from there on."""

    num_not_compared: int
    num_flipped_tokens: int
    turned: TurnedDecisions | None
    hidden_from_step: int | None
    notes: tuple[Note, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unexercised:
    """The parts of training that were 0 throughout, on both sides, so that no error in them could show."""

    advantages: bool
    policy_loss: bool
    gradient: bool


def find_unexercised(metrics: MetricComparison | None) -> Unexercised | None:
    """Finds what was 0 at every compared step, by the metrics of both; ``None`` where nothing is."""
    zero = {item.name for item in metrics.differences if item.is_zero} if metrics is not None else set()
    found = Unexercised(
        advantages={"advantage_min", "advantage_max"} <= zero,
        policy_loss="pg_loss" in zero,
        gradient="grad_norm" in zero,
    )
    return found if found.advantages or found.policy_loss or found.gradient else None


def find_limits(tensors: TensorComparison) -> Limits:
    """Returns the limits of a comparison of tensors."""
    return Limits(
        num_not_compared=len(tensors.not_compared),
        num_flipped_tokens=sum(item.num_flipped for item in tensors.flips),
        turned=_count_turned(tensors.flipped_decisions),
        hidden_from_step=first_hidden_step(tensors),
        notes=tensors.notes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Unseen:
    """What the model has and the comparison did not look at.

    Args:
        modules: Modules without a compared output, by name, with the reason. Their parameters are compared.
        module_share: The share of the compared parameters' elements that these modules hold.
        parameters: Parameters without a compared gradient or value, and their numbers of elements; 0 is not known.
        parameter_share: Their share of all elements; ``None`` where a number is not known.
        steps: Steps of one side alone that the other one says it does not have, or not trace.
        last_state: The optimizer's moments as the last update left them, which no later update shows.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    module_share: float = 0.0
    parameters: Mapping[str, int] = field(default_factory=dict)
    parameter_share: float | None = 0.0
    steps: tuple[AbsentSteps, ...] = ()
    last_state: bool = False

    @property
    def begins(self) -> AbsentSteps | None:
        """Returns the steps before the later one of two runs began; ``None`` where they begin together."""
        return next((item for item in self.steps if item.why == "before"), None)


def find_unseen(
    tensors: TensorComparison | None,
    *,
    modules: Mapping[str, str],
    parameters: Mapping[str, int],
    metrics: MetricComparison | None = None,
    asks_last_state: bool = False,
    selection: Selection = EVERYTHING,
) -> Unseen | None:
    """What a comparison did not look at; ``None`` where it looked at everything that was chosen.

    Args:
        modules: As the two runs state them: modules whose output nothing can show, with the reason.
        parameters: Parameters that neither run traced, with their numbers of elements.
        metrics: Of the same comparison.
        asks_last_state: Both runs can show the state at their end.
        selection: The compared choice; what was not chosen is not missed.
    """
    steps = dict.fromkeys(step for item in (tensors, metrics) if item is not None for step in item.absent_steps)
    if tensors is None or selection.kinds is not None:
        return Unseen(steps=tuple(steps)) if steps else None
    compared: dict[str, int] = {}
    absent: dict[str, int] = {}
    for item in tensors.differences:
        if item.key.kind in JUDGED_KINDS:
            name = item.key.name
            compared[name] = max(compared.get(name, 0), item.num_elements)
            absent[name] = min(absent.get(name, item.num_absent), item.num_absent)
    hidden, missed = dict(modules), dict(parameters)
    for gap in tensors.not_compared:
        if gap.kind in JUDGED_KINDS:
            missed.setdefault(gap.name, 0)
        elif gap.kind in _OUTPUT_KINDS:
            reason = next((item.reason for item in gap.reasons if isinstance(item, NotShown)), "only some ranks")
            hidden.setdefault(gap.name, reason)
    seen = {name for name, size in compared.items() if size}
    missed = {name: size for name, size in missed.items() if name not in seen}
    missed |= {name: absent[name] for name in seen if absent[name]}
    shown = {item.key.name for item in tensors.differences if item.key.kind in _OUTPUT_KINDS}
    hidden = {name: why for name, why in hidden.items() if name not in shown and selection.has_name(name)}
    missed = {name: size for name, size in missed.items() if selection.has_name(name)}
    last = max(tensors.steps, default=None)
    moments = any(item.key.kind == "optimizer" and item.key.step == last for item in tensors.differences)
    is_whole = selection.steps is None and selection.patterns == EVERYTHING.patterns
    is_lost = asks_last_state and is_whole and not moments and last is not None
    if not hidden and not missed and not steps and not is_lost:
        return None
    total = sum(compared.values())
    inside = sum(size for name, size in compared.items() if any(name.startswith(f"{module}.") for module in hidden))
    num_missed = sum(missed.values())
    return Unseen(
        modules=hidden,
        module_share=_share(inside, total),
        parameters=missed,
        parameter_share=_share(num_missed, total + num_missed) if all(missed.values()) else None,
        steps=tuple(steps),
        last_state=is_lost,
    )


def _share(part: int, total: int) -> float:
    return part / total if total else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Causes:
    """Holds possible causes of a divergence, and reasons to think less of it.

    Args:
        conflict: Replicas of the candidate disagree.
        has_grown: It grew over the updates before, as rounding grows when training amplifies it.
        turned: Earlier decisions that rounding turned; no bound was measured behind them.
        flips: Earlier tokens with other experts, by rounding.
    """

    conflict: ReplicaConflict | None
    has_grown: bool
    turned: TurnedDecisions | None
    flips: tuple[ExpertFlips, ...]


def find_causes(first: Divergence, tensors: TensorComparison) -> Causes:
    """Returns the causes of a first divergence, out of its comparison."""
    conflicts = tensors.candidate_conflicts
    # Only an estimated bound leaves room for a decision that rounding turned.
    turned = [item for item in tensors.flipped_decisions if item.key.step <= first.step and first.is_estimate]
    place = first.step, first.update or 0
    return Causes(
        # A bound of 0 is that of the conflict itself, which needs no cause.
        conflict=conflicts[0] if conflicts and first.bound != 0.0 else None,
        has_grown=_has_grown(first, tensors),
        turned=_count_turned(turned),
        flips=tuple(item for item in tensors.flips if (item.key.step, item.key.update) <= place),
    )


def _count_turned(turned: list[TensorDifference] | tuple[TensorDifference, ...]) -> TurnedDecisions | None:
    if not turned:
        return None
    return TurnedDecisions(
        num_turned=sum(item.num_flipped_decisions for item in turned),
        num_decisions=sum(item.num_decisions for item in turned),
        first=turned[0],
    )


def _has_grown(first: Divergence, tensors: TensorComparison) -> bool:
    """Whether the first tensor beyond its bound was near it at the update before, and not at the first one."""
    series = [item for item in tensors.differences if (item.key.kind, item.key.name) == (first.kind, first.name)]
    before = [item for item in series if (item.key.step, item.key.update) < (first.step, first.update or 0)]
    if not before or first.value is None or first.bound == 0:
        return False
    # Rounding grows step by step: near its bound one update before, and far smaller at the first one.
    is_near = before[-1].relative > NEARLY_BEYOND * before[-1].tolerance
    return is_near and before[0].relative < GREW_TENFOLD * before[-1].relative
