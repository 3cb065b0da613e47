"""How far a verdict reaches: the tensor nearest to its bound, the smallest error it would find, its limits and causes.

Contract: pure; facts of a comparison, ``wording`` makes sentences of them, and reports make JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mock_scheduler.comparison.findings import Note
from mock_scheduler.comparison.noise.judging import first_hidden_step
from mock_scheduler.comparison.tensors import ExpertFlips, TensorComparison, TensorDifference
from mock_scheduler.comparison.thresholds import GREW_TENFOLD, NEARLY_BEYOND
from mock_scheduler.comparison.walk.metrics import MetricComparison, MetricDifference
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.divergences import Divergence


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
    """The limits of a comparison of tensors."""
    return Limits(
        num_not_compared=len(tensors.not_compared),
        num_flipped_tokens=sum(item.num_flipped for item in tensors.flips),
        turned=_count_turned(tensors.flipped_decisions),
        hidden_from_step=first_hidden_step(tensors),
        notes=tensors.notes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Causes:
    """Possible causes of a divergence, and reasons to think less of it.

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
    """The causes of a first divergence, out of its comparison."""
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
