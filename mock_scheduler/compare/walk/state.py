"""The state of one parameter within one step, in the order of computation: before, gradient, after, weight.

- An *initial* parameter of step 0 must be bit-equal: both runs start from the same weights. At a later first step it is
  judged as any tensor of the forward pass is. Of steps that follow others it is the last parameter once more.
- What an update did to a parameter without gradient may be *decisions* (``decisions``).
- A *weight* (what a model in less than float32 computes with) must be the rounded parameter, bit for bit, in each run.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from mock_scheduler.compare.bounds.bounds import Bounds
from mock_scheduler.compare.explain.expert_bias import judge_decisions, read_decisions
from mock_scheduler.compare.measure.distance import Pair, compare_updates, find_significant, is_bit_equal
from mock_scheduler.compare.measure.figures import compute_figures
from mock_scheduler.compare.pairing.pairs import TensorPair, all_of
from mock_scheduler.compare.pairing.selection import Selection
from mock_scheduler.compare.tensors import TensorDifference
from mock_scheduler.compare.walk.found import SIDES
from mock_scheduler.config.trace import TraceKind

#: What is compared together, in the order within one update.
STATE_KINDS: tuple[TraceKind, ...] = ("initial", "gradient", "parameter", "weight")


class Measures(Protocol):
    """What the walk of a step offers."""

    def measure(self, pair: TensorPair) -> None:
        """Judge and keep any tensor but a parameter."""

    def add(self, difference: TensorDifference, pair: TensorPair) -> None:
        """Keep a difference."""

    def describe_initial(self, pair: TensorPair) -> str:
        """What an initial parameter looks like that differs, in words; empty where that is nothing."""

    def find_moved_experts(self, pair: TensorPair) -> Collection[int] | None:
        """Of one number for each expert, those that other tokens chose in its update; ``None`` where not known."""


def needed_kinds(selection: Selection) -> frozenset[TraceKind]:
    """The kinds that must be read to compare the selected ones."""
    selected = {kind for kind in STATE_KINDS if selection.has_kind(kind)}
    if "parameter" in selected:
        selected |= {"initial", "gradient"}
    if "weight" in selected:
        selected |= {"initial", "parameter"}
    return frozenset(selected)


class StateWalk:
    """Compares the tensors of one name, given one after another; ``has_gradient``: whether one moves it."""

    def __init__(self, step: Measures, *, bounds: Bounds, is_first: bool, has_gradient: bool) -> None:
        self._step = step
        self._has_gradient = has_gradient
        self._bounds = bounds
        self._is_first = is_first
        self._gradient: TensorPair | None = None
        self._parameter: TensorPair | None = None

    def compare(self, pair: TensorPair, *, is_reported: bool) -> str:
        """Judge the next tensor; returns what is wrong, where that is no number.

        ``is_reported``: whether its difference is kept; else it only serves to judge others.
        """
        kind = pair.key.kind
        if kind == "gradient":
            self._gradient = pair
            if is_reported:
                self._step.measure(pair)
            return ""
        if kind == "weight":
            return self._check_weight(pair)
        before, self._parameter = self._parameter, pair
        gradient, self._gradient = self._gradient, None
        if kind == "initial":
            return self._check_initial(pair) if self._is_first and is_reported else ""
        if before is None:
            return "was traced without the parameter before it, so its update cannot be judged"
        if is_reported:
            self._step.add(self._compare_update(before, pair, gradient), pair)
        return ""

    def _check_initial(self, pair: TensorPair) -> str:
        if pair.key.step > 0:
            self._step.measure(pair)
            return ""
        if pair.is_equal:
            return ""
        looks_like = self._step.describe_initial(pair)
        text = f"{looks_like}; " if looks_like else ""
        return f"differs: {text}both runs must start from the same weights, to the last bit"

    def _compare_update(self, before: TensorPair, after: TensorPair, gradient: TensorPair | None) -> TensorDifference:
        pairs = [before, after, *([gradient] if gradient is not None else [])]
        present = all_of([pair.present for pair in pairs])
        old, new, *rest = (_kept(pair, present) for pair in pairs)
        figures = after.sums.figures
        if present is not None and present is not after.present:
            figures = compute_figures(after.baseline, after.candidate, present=present)
        bound = self._bounds.tensor(after.key)
        difference = compare_updates(
            after.key,
            before=old,
            after=new,
            gradients=rest[0] if rest and gradient is not None and not gradient.is_equal else None,
            significant=0.0 if gradient is None else find_significant(gradient.sums.figures.relative, bound),
            bound=bound,
            figures=figures,
            is_same_before=before.is_equal or None,
        )
        if self._has_gradient or difference.bit_equal or bound.is_exact:
            return difference
        decisions = read_decisions(old, new)
        if decisions is None:
            return difference
        moved = self._step.find_moved_experts(after)
        return judge_decisions(difference, decisions, bound=bound, moved_experts=moved)

    def _check_weight(self, pair: TensorPair) -> str:
        if self._parameter is None:
            return "was traced without the parameter that it is rounded from"
        present = all_of([pair.present, self._parameter.present])
        weights, parameters = _kept(pair, present), _kept(self._parameter, present)
        for side, weight, parameter in zip(SIDES, weights, parameters, strict=True):
            if not is_bit_equal(weight, parameter.to(weight.dtype)):
                return f"is not the rounded parameter in the {side}: the model computes with other weights"
        return ""


def _kept(pair: TensorPair, present: torch.Tensor | None) -> Pair:
    """Both sides, as far as both runs have them."""
    if present is None:
        return pair.baseline, pair.candidate
    kept = present.expand_as(pair.baseline)
    return pair.baseline[kept], pair.candidate[kept]
