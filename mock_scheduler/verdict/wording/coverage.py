"""How far a verdict reaches, in words: the compared things, the smallest detectable error, and the limits."""

from __future__ import annotations

from collections.abc import Mapping

from mock_scheduler.comparison.findings import AbsentSteps
from mock_scheduler.comparison.tensors import JUDGED_KINDS, TensorComparison, TensorGroup
from mock_scheduler.comparison.walk.metrics import MetricComparison
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.support.text import count_of, list_some
from mock_scheduler.trace.stated_steps import AbsenceReason
from mock_scheduler.verdict.coverage import (
    TurnedDecisions,
    Unseen,
    find_limits,
    find_nearest,
    find_smallest_error,
    find_unexercised,
)
from mock_scheduler.verdict.wording.findings import describe_note
from mock_scheduler.verdict.wording.tensors import count_kind, join_and, name_kinds

_NUM_NAMED = 3


def describe_coverage(metrics: MetricComparison | None, tensors: TensorComparison | None) -> str:
    """The compared metrics and tensors by kind, how many of them are equal, and how many had no say."""
    parts = []
    if metrics is not None:
        parts.append(f"{count_of(len(metrics.differences), 'metric')} over {count_of(len(metrics.steps), 'step')}")
    for kind in tensors.kinds if tensors is not None else ():
        group = tensors.group(kind) if tensors is not None else None
        if group is not None:
            parts.append(f"{count_kind(group.num_compared, kind)}{_describe_group(group)}")
    if tensors is not None and not tensors.differences and tensors.num_exact:
        parts.append(count_of(tensors.num_exact, "initial or rounded parameter"))
    return ", ".join(parts)


def describe_nearest(tensors: TensorComparison | None) -> str:
    """The tensor nearest to its bound; empty where no judged tensor differs by a number."""
    nearest = find_nearest(tensors)
    if nearest is None or not nearest.relative > 0:
        return ""
    margin = f"{nearest.margin:,.0f}" if nearest.margin >= 10 else f"{nearest.margin:.1f}"
    return (
        f"nearest to its bound: {nearest.key.describe()}, {nearest.relative:.2e}, {margin} times below "
        f"{nearest.tolerance:.2g}"
    )


def describe_smallest(metrics: MetricComparison | None, tensors: TensorComparison | None) -> str:
    """Returns the smallest detectable error of each compared kind."""
    found = find_smallest_error(metrics, tensors)
    parts = []
    if found.bounds:
        by_bound = _group_by_bound({kind: f"{bound:.2g}" for kind, bound in found.bounds.items()})
        zero = ""
        if found.num_without_size:
            zero = f" ({count_of(found.num_without_size, 'tensor')} of the baseline 0, without a size)"
        parts.append(f"a divergence would have been any relative error above {by_bound}{zero}")
    metric = found.nearest_metric
    if metric is not None:
        parts.append(
            f"the metric nearest to its bound, {metric.name}, is at {metric.times_bound:.2g} of it at step "
            f"{metric.nearest_step}"
        )
    return "; ".join(parts)


def describe_smallest_tensor(tensors: TensorComparison) -> str:
    """The same of gradients and parameters alone; where neither was compared, of all kinds."""
    bounds = find_smallest_error(None, tensors).bounds
    judged = {kind: bound for kind, bound in bounds.items() if kind in JUDGED_KINDS}
    if not any(kind in JUDGED_KINDS for kind in tensors.kinds):
        judged = dict(bounds)
    if not judged:
        return ""
    return f"a relative error above {_group_by_bound({kind: f'{bound:.1e}' for kind, bound in judged.items()})}"


def describe_unseen(unseen: Unseen | None) -> str:
    """The modules and parameters that nobody looked at, with their shares; empty where there are none."""
    if unseen is None:
        return ""
    parts = []
    if unseen.modules:
        share = f" with {_percent(unseen.module_share)} of the compared parameters" if unseen.module_share else ""
        names = list_some(list(unseen.modules), _NUM_NAMED, ", ")
        parts.append(f"the output of {count_of(len(unseen.modules), 'module')}{share} ({names})")
    if unseen.parameters:
        share = "" if unseen.parameter_share is None else f" with {_percent(unseen.parameter_share)} of all elements"
        names = list_some(list(unseen.parameters), _NUM_NAMED, ", ")
        parts.append(f"{count_of(len(unseen.parameters), 'parameter')}{share} ({names})")
    further = [*map(_describe_absent, unseen.steps)]
    further += ["the optimizer's moments behind the last update"] if unseen.last_state else []
    return "; ".join(filter(None, (" and ".join(parts), *further)))


def describe_begin(unseen: Unseen | None) -> str:
    """Returns ``from step 2 on, where the candidate begins``; empty where both runs begin together."""
    if unseen is None or unseen.begins is None:
        return ""
    last = unseen.begins.steps.ranges[-1][1] or 0
    return f"from step {last + 1} on, where the {unseen.begins.side} begins"


def _describe_absent(absent: AbsentSteps) -> str:
    (first, last), *more = absent.steps.ranges
    steps = f"step{'' if first == last and not more else 's'} {absent.steps}"
    return _ABSENT[absent.why].format(steps=steps, side=absent.side)


_ABSENT: Mapping[AbsenceReason, str] = {
    "before": "{steps}, before the {side} begins",
    "after": "{steps}, after the {side} has ended",
    "untraced": "the tensors of {steps}, which the {side} was not to trace",
}


def _percent(share: float) -> str:
    """``12.3 %``; what is there is never 0 %, and what is missing never 100 %."""
    if 0.0 < share < 0.0005:
        return "less than 0.1 %"
    return "more than 99.9 %" if 0.9995 <= share < 1.0 else f"{100 * share:.1f} %"


def describe_limits(tensors: TensorComparison | None) -> list[str]:
    """Returns the limits of a verdict, a clause for each."""
    if tensors is None:
        return ["metrics alone do not prove that gradients are equal"]
    limits = find_limits(tensors)
    parts = []
    if limits.num_not_compared:
        parts.append(f"{count_of(limits.num_not_compared, 'tensor')} not compared, not being shown by both runs")
    if limits.num_flipped_tokens:
        parts.append(f"rounding chose other experts for {count_of(limits.num_flipped_tokens, 'token')}")
    if limits.turned is not None:
        parts.append(describe_turned(limits.turned))
    if limits.hidden_from_step is not None:
        parts.append(
            f"from step {limits.hidden_from_step} on nothing can be judged: differences there are noise, whatever they "
            "are"
        )
    return [*parts, *map(describe_note, limits.notes)]


def describe_unexercised(metrics: MetricComparison | None) -> list[str]:
    """What was 0 throughout, and so outside the proof; a clause, or none."""
    found = find_unexercised(metrics)
    if found is None:
        return []
    parts = [
        text
        for is_zero, text in (
            (found.advantages, "every advantage"),
            (found.policy_loss, "the policy's loss"),
            (found.gradient, "every gradient"),
        )
        if is_zero
    ]
    verb = "is" if len(parts) == 1 else "are"
    return [f"{join_and(parts)} {verb} exactly 0 in every step, so that an error there could not show"]


def describe_turned(turned: TurnedDecisions) -> str:
    """Returns ``rounding turned 1 of 4 decisions, first in parameter of … at step 0, update 0``."""
    decisions = count_of(turned.num_decisions, "decision")
    return f"rounding turned {turned.num_turned} of {decisions}, first in {turned.first.key.describe()}"


def _group_by_bound(texts: dict[TraceKind, str]) -> str:
    """Returns ``1e-4 of gradients and activations; 5e-3 of parameters``."""
    kinds: dict[str, list[str]] = {}
    for kind, text in texts.items():
        kinds.setdefault(text, []).append(name_kinds(kind))
    return "; ".join(f"{text} of {join_and(names)}" for text, names in kinds.items())


def _describe_group(group: TensorGroup) -> str:
    if group.num_bit_equal == group.num_compared:
        return ""
    stored = "" if group.worst.relative else "; the others within the rounding of storing"
    excluded = f"; {group.fraction_excluded:.2%} of elements left out" if group.fraction_excluded else ""
    unjudged = f"; {group.num_unjudged} not judged, being no larger than noise" if group.num_unjudged else ""
    return f" ({group.num_bit_equal} bit-equal{stored}{excluded}{unjudged})"
