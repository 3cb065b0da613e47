"""A candidate's verdict in plain words: one line, what proved it, and the smallest error that would have been found.

Contract: out of results alone, without a terminal or a page, so that all reports of an alignment say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mock_scheduler.compare.tensors import JUDGED_KINDS, TensorComparison, TensorDifference
from mock_scheduler.report.alignment.heat import describe_ratio
from mock_scheduler.report.comparison.view import worst_judged
from mock_scheduler.support.text import count_of
from mock_scheduler.trace.kinds import TraceKind
from mock_scheduler.verdict.proofs import PROOF_NAMES, Outcome, Proof, ProofName
from mock_scheduler.verdict.results import CandidateResult
from mock_scheduler.verdict.sentence import name_kinds
from mock_scheduler.verdict.verdict import Verdict, VerdictKind
from mock_scheduler.verdict.wording.bounds import describe_suspicion

#: How to read each verdict, in one sentence.
LEGEND: Mapping[VerdictKind, str] = {
    VerdictKind.IDENTICAL: "every metric, gradient, parameter and replica is equal to the last bit",
    VerdictKind.EMULATED: "equal to the last bit to a reference that adds in the candidate's order",
    VerdictKind.ROUNDING: "differs, and nothing is beyond its bound",
    VerdictKind.SUSPECT: "within its bounds, but with a systematic slope, drift or concentrated in one place",
    VerdictKind.DIVERGED: "something is beyond its bound or missing, or replicas disagree",
    VerdictKind.INCOMPARABLE: "the run failed, or nothing could be compared",
    VerdictKind.UNVERIFIED: "the runs are not shown to be deterministic, so a difference between them proves nothing",
}

#: What each proof shows where it holds, strongest first.
PROOF_MEANINGS: Mapping[ProofName, str] = {
    "replicas": "ranks that must hold the same bits do",
    "bit-equality": "every tensor has the baseline's bits",
    "emulation": "every tensor has the bits of a reference that adds in the candidate's order",
    "noise": "no difference is larger, more systematic or more concentrated than one unit of rounding makes it",
    "referee": "in float64 the two sides agree as two orders of the same sums do",
}

#: A sign for each outcome, for where colour alone would tell them apart.
PROOF_MARKS: Mapping[Outcome, str] = {"proved": "✓", "refuted": "✗", "open": "?", "not tried": "–"}

_NOT_TRIED: Mapping[VerdictKind, str] = {
    VerdictKind.INCOMPARABLE: "nothing could be compared",
    VerdictKind.UNVERIFIED: "the runs are not shown to be deterministic",
}
_FIRST, _AGAINST = "first divergence: ", "against the baseline: "
_PASSES = (VerdictKind.IDENTICAL, VerdictKind.EMULATED, VerdictKind.ROUNDING)


def complete_ladder(candidate: CandidateResult) -> tuple[Proof, ...]:
    """All proofs, strongest first; one that the result does not have was not tried."""
    by_name = {proof.name: proof for proof in candidate.proofs}
    reason = _NOT_TRIED.get(candidate.alignment.verdict, "not needed, or not asked for")
    return tuple(by_name.get(name) or Proof(name=name, outcome="not tried", text=reason) for name in PROOF_NAMES)


def describe_proof(proof: Proof, alignment: Verdict) -> str:
    """What a proof found, without the sentence of the first divergence, which stands before it."""
    said, same = f"{_FIRST}{alignment.sentence}", f"{_FIRST}as said above"
    if proof.text.endswith(said):
        return f"{proof.text.removesuffix(said)}{same}"
    return proof.text.replace(f"{said}; ", f"{same}; ", 1)


def describe_reason(candidate: CandidateResult) -> str:
    """What a verdict rests on beside its sentence and its proofs, which stand beside it; empty where nothing else."""
    alignment = candidate.alignment
    rest = alignment.reason
    for proof in sorted(candidate.proofs, key=lambda proof: -len(proof.text)):
        rest = rest.replace(f"{_AGAINST}{proof.text}", "").replace(proof.text, "") if proof.text else rest
    if alignment.sentence:
        rest = rest.removeprefix(_FIRST).replace(f"{_FIRST}{alignment.sentence}", "").replace(alignment.sentence, "", 1)
    return "; ".join(part for part in rest.split("; ") if part)


def describe_proved_by(candidate: CandidateResult) -> str:
    """What the verdict rests on: ``emulation``, ``noise, referee``; of a divergence ``refuted by noise``."""
    verdict = candidate.alignment.verdict
    if verdict is VerdictKind.IDENTICAL:
        return ", ".join(_named(candidate.proofs, "proved", only=("bit-equality",))) or "bit-equality"
    if verdict in _PASSES:
        names = _named(candidate.proofs, "proved", only=("emulation", "noise", "referee"))
        return ", ".join(names[:1] if verdict is VerdictKind.EMULATED else names) or "–"
    against = _named(candidate.proofs, "refuted", only=("replicas", "emulation", "noise", "referee"))
    return f"refuted by {', '.join(against)}" if against else "–"


def _named(proofs: Sequence[Proof], outcome: Outcome, *, only: Sequence[ProofName]) -> list[str]:
    return [proof.name for proof in proofs if proof.outcome == outcome and proof.name in only]


def write_headline(candidate: CandidateResult) -> str:
    """The verdict in one line of plain words."""
    alignment, tensors = candidate.alignment, candidate.alignment.tensors
    match alignment.verdict:
        case VerdictKind.IDENTICAL:
            return f"every bit is equal{_coverage(tensors)}"
        case VerdictKind.EMULATED:
            compared = None if candidate.emulated is None else candidate.emulated.tensors
            return f"every bit is equal to a reference that adds in its order{_coverage(compared or tensors)}"
        case VerdictKind.ROUNDING:
            worst = None if tensors is None else worst_judged(tensors)
            nearest = "" if worst is None else f"; nearest is {worst.key.describe()} at {describe_ratio(worst)}"
            return f"differs by no more than rounding does{nearest}"
        case VerdictKind.SUSPECT:
            outcomes = {proof.name: proof.outcome for proof in candidate.proofs}
            if outcomes.get("noise") == "refuted":
                is_excused = outcomes.get("referee") == "proved" and alignment.sentence
                return (
                    f"beyond its bounds, and not in float64: {alignment.sentence}" if is_excused else alignment.reason
                )
            doubts = [describe_suspicion(item) for item in alignment.suspicions]
            doubts += [proof.text for proof in candidate.proofs if (proof.name, proof.outcome) == ("noise", "open")]
            return f"within its bounds, and yet {doubts[0]}" if doubts else alignment.reason
        case VerdictKind.DIVERGED:
            if candidate.localisation is not None:
                return candidate.localisation.sentence
            return alignment.sentence or alignment.reason
        case _:
            return alignment.reason


def _coverage(tensors: TensorComparison | None) -> str:
    if tensors is None:
        return ""
    return f", in {count_of(len(tensors.differences), 'tensor')} over {count_of(len(tensors.steps), 'step')}"


def describe_smallest_error(candidate: CandidateResult) -> str:
    """The smallest error that would have been found, where the verdict passes; empty else.

    Of gradients and parameters, for each the largest of all bounds; where neither was compared, of what was.
    """
    alignment = candidate.alignment
    if alignment.verdict in (VerdictKind.IDENTICAL, VerdictKind.EMULATED):
        return "one changed bit"
    if alignment.verdict is not VerdictKind.ROUNDING or alignment.tensors is None:
        return ""
    largest: dict[str, list[TraceKind]] = {}
    compared = alignment.tensors.kinds
    for kind in [kind for kind in compared if kind in JUDGED_KINDS] or compared:
        bounds = [item.tolerance for item in alignment.tensors.differences if _has_bound(item, kind)]
        if bounds:
            largest.setdefault(f"{max(bounds):.1e}", []).append(kind)
    if not largest:
        return ""
    listed = [f"{bound} of {_join([name_kinds(kind) for kind in kinds])}" for bound, kinds in largest.items()]
    return f"a relative error above {'; '.join(listed)}"


def _join(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _has_bound(difference: TensorDifference, kind: TraceKind) -> bool:
    return difference.key.kind == kind and difference.is_bounded
