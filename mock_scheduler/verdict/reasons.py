"""What a verdict's reason says beside the first divergence: where it may come from, and why nothing could be judged."""

from __future__ import annotations

from collections.abc import Sequence

from mock_scheduler.compare.bounds.bounds import Bounds
from mock_scheduler.compare.tensors import TensorComparison, TensorDifference
from mock_scheduler.compare.thresholds import GREW_TENFOLD, NEARLY_BEYOND
from mock_scheduler.support.text import count_of
from mock_scheduler.verdict.divergences import Divergence
from mock_scheduler.verdict.wording.bounds import describe_bounds_advice


def describe_causes(first: Divergence, tensors: TensorComparison) -> list[str]:
    """What may have led to the first divergence, or makes it less than it seems."""
    parts = []
    if tensors.candidate_conflicts and first.tolerance != 0.0:
        parts.append(f"replicas disagree: {tensors.candidate_conflicts[0].describe()}")
    if _grew_gradually(first, tensors):
        parts.append(
            "it grew over the updates before, as rounding does that training amplifies; to tell it from a fault, align "
            "fewer steps"
        )
    turned = [item for item in tensors.flipped_decisions if item.key.step <= first.step and first.is_estimate]
    if turned:
        parts.append(
            f"{describe_turned(turned)} before: what follows goes on from other values, of which no bound was measured"
        )
    earlier = [item for item in tensors.flips if (item.key.step, item.key.update) <= (first.step, first.update or 0)]
    if earlier:
        num_flipped = sum(item.num_flipped for item in earlier)
        parts.append(
            f"rounding chose other experts for {count_of(num_flipped, 'token')} before, first in "
            f"{earlier[0].key.name}: what these compute afterwards differs at its full size"
        )
    return parts


def describe_turned(turned: Sequence[TensorDifference]) -> str:
    """``rounding turned 1 of 4 decisions, first in parameter of … at step 0, update 0``."""
    flipped, total = sum(item.num_flipped_decisions for item in turned), sum(item.num_decisions for item in turned)
    return f"rounding turned {flipped} of {count_of(total, 'decision')}, first in {turned[0].key.describe()}"


def no_bound(bounds: Bounds) -> str:
    """Why nothing is judged, and what would let it be."""
    if bounds.noise is not None:
        return "the noise is as large as they are; compare fewer steps, or in float32 or float64"
    advice = describe_bounds_advice(bounds)
    return f"nothing bounds them; state bounds with --tolerance{f', or {advice}' if advice else ''}"


def describe_idle(tensors: TensorComparison, bounds: Bounds) -> str:
    """Why the runs trained nothing that could be compared; empty where they did, or neither kind was compared."""
    gradients, changes = (
        [item for item in tensors.differences if item.key.kind == kind] for kind in ("gradient", "parameter")
    )
    if gradients and all(item.is_zero for item in gradients):
        return (
            "nothing was trained: every gradient of the baseline is 0, so any change would look equal; align on "
            "rollouts whose rewards differ within a group, or with an entropy or KL term"
        )
    names = {item.key.name for item in gradients}
    changes = [item for item in changes if not names or item.key.name in names]  # what no gradient moves moves anyway
    if changes and all(item.is_zero for item in changes):
        return "nothing was trained: no update of the baseline changed a parameter, so any change would look equal"
    if bounds.source != "stated" and gradients and not any(item.is_judged for item in gradients):
        return f"no gradient was judged: {no_bound(bounds)}"
    if changes and not any(item.is_judged for item in changes):
        if bounds.source != "stated":
            return f"no parameter was judged: {no_bound(bounds)}"
        return (
            "no parameter was judged: every update changes less than parameters can be stored with; raise training.lr"
        )
    return ""


def _grew_gradually(first: Divergence, tensors: TensorComparison) -> bool:
    """Whether the first tensor beyond its tolerance was near it at the update before, and not at the first one."""
    series = [item for item in tensors.differences if (item.key.kind, item.key.name) == (first.kind, first.name)]
    before = [item for item in series if (item.key.step, item.key.update) < (first.step, first.update or 0)]
    if not before or first.value is None or first.tolerance == 0:
        return False
    return (
        before[-1].relative > NEARLY_BEYOND * before[-1].tolerance
        and before[0].relative < GREW_TENFOLD * before[-1].relative
    )
