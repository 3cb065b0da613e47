"""Compares the state of one parameter within one step, in the order of computation: before, gradient, after, weight.

- An *initial* parameter of step 0 must be bit-equal: both runs start from the same weights. Where one run computes in
  less than the other, it must be the other's rounded to nearest. At a later first step it is judged as any tensor of
  the forward pass is. In steps after others it is the last parameter once more.
- The update of a parameter without gradient may be *decisions* (``explain.expert_bias``).
- A *weight*, in which a model in less than float32 computes, must be the rounded parameter, bit for bit, in each run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from mock_scheduler.comparison.bounds.bounds import Bounds
from mock_scheduler.comparison.explain.expert_bias import judge_decisions, read_decisions
from mock_scheduler.comparison.findings import SIDES, LacksParameter, OtherStart, OtherWeight
from mock_scheduler.comparison.measure.changes import Pair
from mock_scheduler.comparison.measure.distance import compare_updates, find_significant, is_rounded
from mock_scheduler.comparison.measure.figures import compute_figures
from mock_scheduler.comparison.pairing.pairs import TensorPair, all_of
from mock_scheduler.comparison.pairing.precision import Narrow, check_rounded
from mock_scheduler.comparison.pairing.selection import Selection
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.names import routed_part

#: What is compared together, in the order within one update.
STATE_KINDS: tuple[TraceKind, ...] = ("initial", "gradient", "parameter", "weight")

MovedExperts = Mapping[tuple[int, str], frozenset[int]]
"""By update and routed part, experts that other tokens chose; without what is not known."""

Outcome = TensorDifference | OtherStart | LacksParameter | OtherWeight | Literal["any tensor", "exact"]
"""How one tensor is judged; ``any tensor``: by what ``measure`` makes of any tensor of a forward or backward pass;
``exact``: it must be equal to the bit, and is."""


def needed_kinds(selection: Selection) -> frozenset[TraceKind]:
    """Returns the kinds to be read for comparing the selected ones."""
    selected = {kind for kind in STATE_KINDS if selection.has_kind(kind)}
    # An update is the change from the parameter before, and its gradient tells which elements rounding moved.
    if "parameter" in selected:
        selected |= {"initial", "gradient"}
    if "weight" in selected:
        selected |= {"initial", "parameter"}
    return frozenset(selected)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRules:
    """How the tensors of one name are to be judged.

    Args:
        bounds: Of all tensors.
        reported: Kinds whose differences are wanted; the others only serve to judge them.
        is_first: The step is the first one compared.
        has_gradient: A gradient moves the parameter.
        moved_experts: From the choices of experts.
        narrow: The side that computes in less; ``None`` where both compute alike.
    """

    bounds: Bounds
    reported: Collection[TraceKind]
    is_first: bool
    has_gradient: bool
    moved_experts: MovedExperts
    narrow: Narrow | None = None


def compare_state(pairs: Iterable[TensorPair], rules: StateRules) -> Iterator[tuple[TensorPair, Outcome]]:
    """Judges the tensors of one name, read one after another, and yields the outcome of each reported one.

    Memory: the gradient, and the parameter before and after an update, and the weight, of both sides.
    """
    gradient: TensorPair | None = None
    before: TensorPair | None = None
    parameter: TensorPair | None = None
    for pair in pairs:
        kind = pair.key.kind
        outcome: Outcome | None = None
        if kind == "gradient":
            gradient, outcome = pair, "any tensor"
        elif kind == "weight":
            outcome = _check_weight(pair, parameter, before)
        else:
            before, parameter = parameter, pair
            if kind in rules.reported:
                outcome = _judge(before, pair, gradient, rules)
            # A gradient belongs to the next update only.
            gradient = None
        if outcome is not None and kind in rules.reported:
            yield pair, outcome


def _judge(
    before: TensorPair | None, pair: TensorPair, gradient: TensorPair | None, rules: StateRules
) -> Outcome | None:
    if pair.key.kind == "initial":
        # A trace of another tool has no parameter after a step that would be compared instead.
        if pair.key.place is not None:
            return "any tensor" if pair.is_equal else OtherStart()
        # Later in a walk it is the parameter that the step before ended with, compared there.
        if not rules.is_first:
            return None
        if pair.key.step > 0:
            return "any tensor"
        return "exact" if pair.is_equal else _check_start(pair, rules.narrow)
    if before is not None:
        return _compare_update(before, pair, gradient, rules)
    return "any tensor" if pair.is_equal else LacksParameter(needed_by="update")


def _check_start(pair: TensorPair, narrow: Narrow | None) -> OtherStart | Literal["exact"]:
    if narrow is None:
        return OtherStart()
    found = check_rounded(_kept(pair, pair.present), narrow)
    return "exact" if found is None else OtherStart(rounded=found)


def _compare_update(
    before: TensorPair, after: TensorPair, gradient: TensorPair | None, rules: StateRules
) -> TensorDifference:
    pairs = [before, after, *([gradient] if gradient is not None else [])]
    # An element that one of the tensors lacks has no change, or nothing that tells whether its change has a say.
    present = all_of([pair.present for pair in pairs])
    old, new, *rest = (_kept(pair, present) for pair in pairs)
    figures = after.sums.figures
    if present is not None and present is not after.present:
        figures = compute_figures(*after.values, present=present)
    bound = rules.bounds.tensor(after.key)
    difference = compare_updates(
        after.key,
        before=old,
        after=new,
        # Equal gradients tell no element apart, so that reading them would be for nothing.
        gradients=rest[0] if rest and gradient is not None and not gradient.is_equal else None,
        significant=0.0 if gradient is None else find_significant(gradient.sums.figures.relative, bound),
        bound=bound,
        figures=figures,
        # Bits that differ may lie in elements left out here: then it is found out for the others.
        is_same_before=before.is_equal or None,
    )
    # Only an update that no gradient makes can be of decisions, and an exact bound allows none to be other.
    if rules.has_gradient or difference.bit_equal or bound.is_exact:
        return difference
    decisions = read_decisions(old, new)
    if decisions is None:
        return difference
    key = after.key
    moved = rules.moved_experts.get((key.update, routed_part(key.name))) if after.dims == ("expert",) else None
    return judge_decisions(difference, decisions, bound=bound, moved_experts=moved)


def _check_weight(
    pair: TensorPair, parameter: TensorPair | None, before: TensorPair | None
) -> LacksParameter | OtherWeight | Literal["exact"]:
    """Checks the weight of both runs; ``before``: the parameter before the update."""
    if parameter is None:
        return LacksParameter(needed_by="weight")
    present = all_of([pair.present, parameter.present])
    weights, parameters = _kept(pair, present), _kept(parameter, present)
    for place, (side, weight, value) in enumerate(zip(SIDES, weights, parameters, strict=True)):
        # Rounded anew from each run's own parameter, so that a difference of the two runs is not blamed on rounding.
        if not is_rounded(weight, value):
            old = None if before is None else _kept(before, present)[place]
            return OtherWeight(side=side, is_of_before=old is not None and is_rounded(weight, old))
    return "exact"


def _kept(pair: TensorPair, present: torch.Tensor | None) -> Pair:
    """Returns both sides, as far as both runs have them."""
    if present is None:
        return pair.values
    kept = present.expand_as(pair.baseline)
    return pair.baseline[kept], pair.candidate[kept]
