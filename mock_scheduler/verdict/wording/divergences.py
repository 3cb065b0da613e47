"""A divergence in words: the place, the tensor, the size, place and look of its difference, and the tensors before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mock_scheduler.compare.findings import Finding
from mock_scheduler.compare.tensors import LedgerComparison, TensorDifference
from mock_scheduler.compare.walk.metrics import MetricDifference
from mock_scheduler.recording.inspection.comparison import ContractDifference, StepDifference
from mock_scheduler.support.text import count_of, list_some
from mock_scheduler.trace.entries import RankPlace
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.trace.kinds import PHASES, TRACE_KINDS, Phase, TraceKind
from mock_scheduler.verdict.divergences import Before, Divergence, StepsOfOneSide
from mock_scheduler.verdict.wording.findings import describe_finding, describe_ledger
from mock_scheduler.verdict.wording.numbers import name_kind
from mock_scheduler.verdict.wording.residuals import describe_locality, describe_residual

#: The part of a step in each phase.
_PHASE_NAMES: Mapping[Phase, str] = {
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


def describe_divergence(divergence: Divergence) -> str:
    """One sentence; of a tensor with its place and the tensors before it: ``step 3, update 0, backward: ...``."""
    found = describe_evidence(divergence)
    if divergence.kind not in TRACE_KINDS or divergence.before is None:
        return found
    place = name_place(divergence.step, divergence.update, divergence.kind)
    before = _describe_before(divergence.before, is_compared=divergence.difference is not None)
    return f"{place}: {found}; {before}"


def describe_evidence(divergence: Divergence) -> str:
    """The difference and its size, without the place in the step."""
    evidence = divergence.evidence
    match evidence:
        case TensorDifference():
            return describe_tensor(evidence)
        case MetricDifference():
            return describe_metric(evidence)
        case ReplicaConflict():
            looks_like = "" if divergence.residual is None else f": {describe_residual(divergence.residual)}"
            return f"copies within the candidate differ: {evidence.describe()}{looks_like}"
        case Finding():
            return describe_finding(evidence)
        case LedgerComparison():
            return "" if evidence.difference is None else describe_ledger(evidence)
        case ContractDifference():
            return f"the contracts differ in {evidence.describe()}"
        case StepsOfOneSide():
            return f"{evidence.folder} {_name_steps(evidence)} in {evidence.side} only"
        case StepDifference():
            return f"{evidence.folder} step {evidence.step}: {evidence.first()}"


def name_place(step: int, update: int | None, kind: TraceKind) -> str:
    """``step 3, update 0, backward``."""
    parts = [f"step {step}", *([] if update is None else [f"update {update}"]), _PHASE_NAMES[PHASES[kind]]]
    return ", ".join(dict.fromkeys(parts))


def describe_tensor(difference: TensorDifference) -> str:
    """Size, look and place of a difference: ``gradient of w differs by 0.57 (bound 0.0001): …``."""
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


def describe_metric(difference: MetricDifference) -> str:
    """A metric beyond its bound: since when, by how much, and where it is furthest beyond."""
    return (
        f"{difference.name} from step {difference.first_exceeding_step} on: relative difference up to "
        f"{difference.max_relative:.3g}, |a-b| {difference.times_bound:.3g} times its bound of {difference.bound:.2g} "
        f"at step {difference.nearest_step}"
    )


def _describe_before(before: Before, *, is_compared: bool) -> str:
    """The tensors before a divergence; ``is_compared``: it is a compared tensor itself."""
    if not before.num_compared:
        return "it is the first tensor that was compared" if is_compared else "nothing was compared before it"
    tensors = f"the {count_of(before.num_compared, 'tensor')} before it"
    verb = "is" if before.num_compared == 1 else "are"
    if before.num_equal == before.num_compared:
        return f"{tensors} {verb} equal"
    unjudged = f", {before.num_unjudged} no larger than noise" if before.num_unjudged else ""
    return f"{tensors} {verb} within their bounds ({before.num_equal} equal{unjudged})"


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


def _name_steps(own: StepsOfOneSide) -> str:
    ranges = own.steps.ranges
    is_one = len(ranges) == 1 and ranges[0][1] in (None, ranges[0][0])
    return f"step {own.steps} is" if is_one else f"steps {own.steps} are"
