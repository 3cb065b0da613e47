"""Updates made of decisions: parameters moved without a gradient, by one step up or down.

The bias of experts moves by ± its rate, as an expert has fewer tokens than the mean or more; 0 where it has as many.
One token sent to another expert by rounding changes two counts, and may turn the sign of both: two honest runs then
differ by two whole steps, however fine the rounding. So such an update is judged as choices of experts are.

Contract: a *decision* is each element of a parameter without gradient, in a step with traced gradients, where in both
runs every element either stays or moves by one and the same step (to 4 units in the last place of float32, in which it
is kept). Its relative difference is the fraction of elements decided differently. Beyond the measured fraction, two
elements may be, for one token. Where the counted choices are known, an expert chosen by exactly the same tokens in both
runs cannot have decided differently: then nothing is allowed. An update of any other form, as with another rate, is
judged as every update, and so is one bound to be equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from mock_scheduler.comparison.bounds.bound import TensorBound
from mock_scheduler.comparison.measure.changes import Pair
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.comparison.thresholds import DECISION_UNITS, ELEMENTS_OF_A_TOKEN
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.whole import WholeTensor


def find_without_gradient(keys: Collection[TraceKey]) -> frozenset[str]:
    """Finds names of parameters without gradient among the tensors of a step; none where no gradient was traced."""
    names = {kind: {key.name for key in keys if key.kind == kind} for kind in ("initial", "parameter", "gradient")}
    # Without any traced gradient, a parameter without one could not be told from the others.
    return frozenset((names["initial"] | names["parameter"]) - names["gradient"]) if names["gradient"] else frozenset()


def find_moved_experts(baseline: torch.Tensor, candidate: torch.Tensor) -> frozenset[int]:
    """Finds experts some token chose in one run only; both sides are choices ``[T, slots]``, integers."""
    differing = (baseline != candidate).any(dim=1)
    moved: set[int] = set()
    for mine, other in zip(baseline[differing].tolist(), candidate[differing].tolist(), strict=True):
        # As sets: the order of a token's slots decides nothing.
        moved |= set(mine) ^ set(other)
    return frozenset(moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decisions:
    """How an update moved each element in both runs: int64 ``[n]``, -1, 0 or 1."""

    baseline: torch.Tensor
    candidate: torch.Tensor

    @property
    def flipped(self) -> torch.Tensor:
        """Returns int64: elements decided differently."""
        return (self.baseline != self.candidate).nonzero().squeeze(1)


def read_decisions(before: Pair, after: Pair) -> Decisions | None:
    """Reads the decisions of an update; ``None`` for an update of another form, or where neither run moved anything."""
    olds, news = ([WholeTensor.of(side).whole().double().reshape(-1) for side in pair] for pair in (before, after))
    # In float64, so that subtracting adds no rounding to that of storing.
    changes = [new - old for old, new in zip(olds, news, strict=True)]
    # The rate of the bias is in no trace; the largest change is one step, since no decision moves further.
    step = max((float(change.abs().max()) for change in changes if change.numel()), default=0.0)
    if not step:
        return None
    unit = DECISION_UNITS * torch.finfo(torch.float32).eps
    signs = []
    for old, new, change in zip(olds, news, changes, strict=True):
        # Each value is rounded to float32 at its own size, which may be far larger than the step.
        rounding = unit * torch.maximum(old.abs(), new.abs()).clamp(min=step)
        is_still, is_moved = change.abs() <= rounding, (change.abs() - step).abs() <= rounding
        if not bool((is_still | is_moved).all()):
            return None
        signs.append(change.sign().long().masked_fill(is_still, 0))
    return Decisions(baseline=signs[0], candidate=signs[1])


def judge_decisions(
    difference: TensorDifference,
    decisions: Decisions,
    *,
    bound: TensorBound,
    moved_experts: Collection[int] | None,
) -> TensorDifference:
    """Judges an update by the fraction of elements decided differently.

    Args:
        difference: Of the update, judged as any other.
        decisions: Of both runs.
        bound: Of the update.
        moved_experts: Elements whose count may differ; ``None`` where not known.
    """
    flipped, total = decisions.flipped.tolist(), decisions.baseline.numel()
    # A turned decision of an expert with the same tokens in both runs is no rounding.
    is_explained = moved_experts is None or set(flipped) <= set(moved_experts)
    return replace(
        difference,
        relative=len(flipped) / total,
        tolerance=max(bound.relative, ELEMENTS_OF_A_TOKEN / total) if is_explained else 0.0,
        num_decisions=total,
        num_flipped_decisions=len(flipped),
    )
