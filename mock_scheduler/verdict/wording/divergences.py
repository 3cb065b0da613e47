"""Puts a divergence into words: place and tensor, its difference's size, place and look, and the tensors before."""

from __future__ import annotations

from collections.abc import Mapping

from mock_scheduler.comparison.findings import Finding
from mock_scheduler.comparison.tensors import LedgerComparison, TensorDifference
from mock_scheduler.comparison.walk.metrics import MetricDifference
from mock_scheduler.config.instruments import TRACE_KINDS, TraceKind
from mock_scheduler.recording.inspection.comparison import ContractDifference, StepDifference
from mock_scheduler.support.text import count_of
from mock_scheduler.trace.entries import PHASES, Phase
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.divergences import Before, Divergence, StepsOfOneSide
from mock_scheduler.verdict.wording.findings import describe_finding, describe_ledger
from mock_scheduler.verdict.wording.residuals import describe_residual
from mock_scheduler.verdict.wording.tensors import describe_metric, describe_tensor

#: The part of a step in each phase.
_PHASE_NAMES: Mapping[Phase, str] = {
    Phase.START: "start",
    Phase.DATA: "inputs",
    Phase.RECOMPUTATION: "recomputation",
    Phase.FORWARD: "forward",
    Phase.SCORES: "scores",
    Phase.LOSS: "loss",
    Phase.BACKWARD: "backward",
    Phase.GRADIENT: "backward",
    Phase.NORM: "gradient norm",
    Phase.UPDATE: "optimizer",
}


def describe_divergence(divergence: Divergence) -> str:
    """One sentence; of a tensor with its place, and the tensors before it if counted: ``step 3, update 0, …: …``."""
    found = describe_evidence(divergence)
    if divergence.kind not in TRACE_KINDS:
        return found
    place = name_place(divergence.step, divergence.update, divergence.kind)
    if divergence.before is None:
        # A finding names the time itself.
        return found if isinstance(divergence.evidence, Finding) else f"{place}: {found}"
    before = _describe_before(divergence.before, is_compared=divergence.difference is not None)
    return f"{place}: {found}; {before}"


def describe_evidence(divergence: Divergence) -> str:
    """Returns the difference and its size, without the place in the step."""
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
    """Returns ``step 3, update 0, backward``."""
    parts = [f"step {step}", *([] if update is None else [f"update {update}"]), _PHASE_NAMES[PHASES[kind]]]
    return ", ".join(dict.fromkeys(parts))


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


def _name_steps(own: StepsOfOneSide) -> str:
    ranges = own.steps.ranges
    is_one = len(ranges) == 1 and ranges[0][1] in (None, ranges[0][0])
    return f"step {own.steps} is" if is_one else f"steps {own.steps} are"
