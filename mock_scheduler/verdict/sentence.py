"""The first divergence in one plain sentence, and what a comparison that passes has compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mock_scheduler.compare.tensors import TensorComparison, TensorDifference, TensorGroup
from mock_scheduler.compare.walk.metrics import MetricComparison
from mock_scheduler.support.text import count_of, list_some
from mock_scheduler.trace.entries import RankPlace
from mock_scheduler.trace.kinds import PHASES, Phase, TraceKind
from mock_scheduler.verdict.wording.residuals import describe_locality, describe_residual

#: What a step does in each phase.
PHASE_NAMES: Mapping[Phase, str] = {
    Phase.START: "start",
    Phase.DATA: "inputs",
    Phase.FORWARD: "forward",
    Phase.SCORES: "scores",
    Phase.LOSS: "loss",
    Phase.BACKWARD: "backward",
    Phase.GRADIENT: "backward",
    Phase.NORM: "gradient norm",
    Phase.UPDATE: "optimizer",
}
_NUM_RANKS = 4


def name_place(step: int, update: int | None, kind: TraceKind) -> str:
    """``step 3, update 0, backward``."""
    parts = [f"step {step}", *([] if update is None else [f"update {update}"]), PHASE_NAMES[PHASES[kind]]]
    return ", ".join(dict.fromkeys(parts))


def describe_tensor(difference: TensorDifference) -> str:
    """What differs, by how much, where and what it looks like: ``gradient of w differs by 0.57 (bound 0.0001): …``."""
    key = difference.key
    amount = f"differs by {difference.relative:.3g} (bound {difference.tolerance:.2g})"
    if difference.low is not None and difference.high is not None:
        amount = (
            f"differs by about {difference.relative:.3g} ({difference.low:.3g} to {difference.high:.3g}; bound "
            f"{difference.tolerance:.2g})"
        )
    details = [
        *([describe_residual(difference.residual)] if difference.residual is not None else []),
        *([describe_locality(difference.localities[0])] if difference.localities else []),
        *_describe_worst(difference),
    ]
    return f"{name_kind(key.kind)} of {key.name} {amount}{': ' if details else ''}{', '.join(details)}"


def describe_before(tensors: TensorComparison, first: TensorDifference | None, place: int) -> str:
    """What the tensors before the first divergence are; ``place``: how many were compared before it."""
    before = tensors.differences[:place]
    if not before:
        return "nothing was compared before it" if first is None else "it is the first tensor that was compared"
    tensors_before = f"the {count_of(len(before), 'tensor')} before it"
    verb = "is" if len(before) == 1 else "are"
    num_equal = sum(item.bit_equal for item in before)
    if num_equal == len(before):
        return f"{tensors_before} {verb} equal"
    num_unjudged = sum(not item.is_judged for item in before)
    unjudged = f", {num_unjudged} no larger than noise" if num_unjudged else ""
    return f"{tensors_before} {verb} within their bounds ({num_equal} equal{unjudged})"


def describe_coverage(metrics: MetricComparison | None, tensors: TensorComparison | None) -> str:
    """What was compared, by kind, how much of it is equal, and what had no say; for a verdict that passes."""
    parts = []
    if metrics is not None:
        parts.append(f"{count_of(len(metrics.differences), 'metric')} over {count_of(len(metrics.steps), 'step')}")
    for kind in tensors.kinds if tensors is not None else ():
        group = tensors.group(kind) if tensors is not None else None
        if group is not None:
            parts.append(f"{count_kind(group.num_compared, kind)}{_describe_group(group)}")
    return ", ".join(parts)


def describe_worst(tensors: TensorComparison | None) -> str:
    """The tensor nearest to its bound, of all that differ and are judged; empty where there is none."""
    judged = [] if tensors is None else [item for item in tensors.differences if item.is_judged and item.relative > 0]
    if not judged:
        return ""
    worst = min(judged, key=lambda item: item.margin)
    return (
        f"nearest to its bound: {worst.key.describe()}, {worst.relative:.2e}, {_describe_margin(worst.margin)} times "
        f"below {worst.tolerance:.2g}"
    )


def describe_smallest(metrics: MetricComparison | None, tensors: TensorComparison | None) -> str:
    """The smallest error that would have been called a divergence, for each kind that was compared.

    Metrics have bounds of their own at every step, so the one nearest to its bound stands for them. A tensor that is 0
    in the baseline has no size that an error could be relative to, and is counted.
    """
    kinds: dict[str, list[str]] = {}
    differing = [item for item in metrics.differences if item.is_judged and not item.bit_equal] if metrics else []
    num_without_size = 0
    for kind in tensors.kinds if tensors is not None else ():
        assert tensors is not None
        of_kind = (item for item in tensors.differences if item.key.kind == kind and item.is_judged)
        judged = [item for item in of_kind if not item.num_decisions]  # their bound is a number of elements
        num_without_size += sum(math.isinf(item.tolerance) for item in judged)
        bounded = [item.tolerance for item in judged if item.is_bounded]
        if bounded:
            kinds.setdefault(f"{max(bounded):.2g}", []).append(name_kinds(kind))
    listed = [f"{bound} of {_join(names)}" for bound, names in kinds.items()]
    zero = f" ({count_of(num_without_size, 'tensor')} of the baseline 0, without a size)" if num_without_size else ""
    text = f"a divergence would have been any relative error above {'; '.join(listed)}{zero}" if listed else ""
    if differing:
        nearest = max(differing, key=lambda item: item.times_bound)
        metric = (
            f"the metric nearest to its bound, {nearest.name}, is at {nearest.times_bound:.2g} of it at step "
            f"{nearest.nearest_step}"
        )
        text = f"{text}; {metric}" if text else metric
    return text


def name_kind(kind: TraceKind) -> str:
    """``activation gradient``."""
    return "initial parameter" if kind == "initial" else kind.replace("_", " ")


def name_kinds(kind: TraceKind) -> str:
    """``activation gradients``, ``logits``, ``loss tensors``."""
    return kind if kind == "logits" else count_kind(2, kind).partition(" ")[2]


def count_kind(count: int, kind: TraceKind) -> str:
    """``1 gradient``, ``12 activations``, ``3 logits tensors``."""
    name = name_kind(kind)
    if kind in ("gradient", "parameter", "weight", "activation", "activation_gradient", "gradient_norm", "initial"):
        return count_of(count, name)
    return count_of(count, f"{name} tensor")


def _join(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _describe_worst(difference: TensorDifference) -> list[str]:
    """Sample, token and index of the worst element, and who held it."""
    worst = None if difference.figures is None else difference.figures.worst
    if worst is None:
        return []
    where = f"largest at index {list(worst.index)}"
    if worst.sample is not None:
        where += f" (sample {worst.sample}, token {worst.position})"
    ranks = _describe_ranks(worst.baseline_ranks, worst.candidate_ranks)
    return [f"{where}{f', held by {ranks}' if ranks else ''}"]


def _describe_ranks(baseline: Sequence[RankPlace], candidate: Sequence[RankPlace]) -> str:
    sides = [list_some([place.describe() for place in places], _NUM_RANKS, ", ") for places in (baseline, candidate)]
    if sides[0] == sides[1]:
        return f"{sides[0]} in both runs" if sides[0] else ""
    named = zip(("in the baseline", "in the candidate"), sides, strict=True)
    return " and ".join(f"{places} {side}" for side, places in named if places)


def _describe_group(group: TensorGroup) -> str:
    if group.num_bit_equal == group.num_compared:
        return ""
    stored = "" if group.worst.relative else "; the others within the rounding of storing"
    return f" ({group.num_bit_equal} bit-equal{stored}{_describe_excluded(group)})"


def _describe_excluded(group: TensorGroup) -> str:
    """How much had no say: elements whose gradients are rounding, and tensors that are too small to be judged."""
    excluded = f"; {group.fraction_excluded:.2%} of elements left out" if group.fraction_excluded else ""
    unjudged = f"; {group.num_unjudged} not judged, being no larger than noise" if group.num_unjudged else ""
    return excluded + unjudged


def _describe_margin(margin: float) -> str:
    return f"{margin:,.0f}" if margin >= 10 else f"{margin:.1f}"
