"""From the comparisons of a candidate to its proofs, strongest first, and from these to its final verdict.

Contract: pure; the comparisons are there already. ``docs/architecture.md`` lists the places of a new kind
of proof ("Where to change things"). Every promotion and demotion of the direct verdict stands here: ``_decide`` goes
down the ladder. ``suspect`` is made

- of ``diverged``, where float64 shows no difference, or where the candidate equals a reference of doubtful standing;
- of ``rounding``, where the reference in the candidate's order shows more than the baseline does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mock_scheduler.comparison.tensors import TensorComparison
from mock_scheduler.verdict.reasons import (
    BIT_EQUAL,
    PROOF_NAMES,
    STRONGER_PROOF,
    ApartFromReference,
    EqualToReference,
    NotTried,
    NotTriedCause,
    ProofName,
    RefutedBy,
    StaysInFloat64,
    VanishesInFloat64,
)
from mock_scheduler.verdict.verdict import (
    WITHOUT_COMPARISON,
    EmulationFacts,
    EqualityFacts,
    Outcome,
    OwnChanges,
    Proof,
    ProofFacts,
    RefereeFacts,
    Verdict,
    VerdictKind,
)

_BY_KIND: dict[VerdictKind, Outcome] = {
    VerdictKind.IDENTICAL: "proved",
    VerdictKind.ROUNDING: "proved",
    VerdictKind.SUSPECT: "open",
    VerdictKind.DIVERGED: "refuted",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The runs and comparisons of a candidate whose run completed.

    Args:
        direct: Compared with the baseline, by noise or other bounds.
        num_processes: Of its run.
        changes: Everything that may move a bit.
        is_same_order: Its order of sums is the baseline's.
        must_be_exact: Nothing but the order of its sums may be another.
        emulated: Compared with the reference that adds in its order, to the last bit where ``must_be_exact``;
            ``None`` where there is none, and ``not_emulated`` says why.
        not_followed: Sums that this reference left in an order of their own.
        layout: The emulated layout.
        wide: Both sides in float64, by bounds of rounding there; ``None`` where they were not run, and
            ``no_referee`` says why.
        shrinking: How many times smaller rounding is in float64.
    """

    direct: Verdict
    num_processes: int
    changes: OwnChanges
    is_same_order: bool
    must_be_exact: bool
    emulated: Verdict | None = None
    not_followed: tuple[str, ...] = ()
    not_emulated: NotTried = BIT_EQUAL
    layout: str = ""
    wide: Verdict | None = None
    no_referee: NotTried = STRONGER_PROOF
    shrinking: float = 1.0


def judge_proofs(evidence: Evidence) -> tuple[Proof, ...]:
    """Judges each proof by itself, in the order of ``reasons.PROOF_NAMES``."""
    return (
        _judge_replicas(evidence),
        _judge_equality(evidence),
        _judge_emulation(evidence),
        _judge_noise(evidence),
        _judge_wide(evidence),
    )


def is_settled(direct: Verdict) -> bool:
    """Whether the comparison with the baseline needs no further run to be judged."""
    return direct.kind in WITHOUT_COMPARISON or direct.kind is VerdictKind.IDENTICAL


def complete_ladder(verdict: Verdict) -> tuple[Proof, ...]:
    """All proofs, strongest first, with a reason for each missing one."""
    cause = {
        VerdictKind.INCOMPARABLE: NotTriedCause.NOTHING_COMPARED,
        VerdictKind.UNVERIFIED: NotTriedCause.NOT_DETERMINISTIC,
    }.get(verdict.kind, NotTriedCause.NOT_NEEDED)
    missing = NotTried(cause=cause)
    return tuple(verdict.proof(name) or Proof(name=name, outcome="not tried", facts=missing) for name in PROOF_NAMES)


def is_same_place(direct: Verdict, wide: Verdict) -> bool:
    """Whether both first differ in the same tensor, or metric."""
    here, there = direct.first, wide.first
    return here is not None and there is not None and here.place == there.place


def _judge_replicas(evidence: Evidence) -> Proof:
    tensors = evidence.direct.tensors
    # One process holds every element once: agreement would be said of nothing.
    if evidence.num_processes == 1:
        return Proof(name="replicas", outcome="not tried", facts=NotTried(cause=NotTriedCause.ONE_PROCESS))
    conflicts = () if tensors is None else tensors.candidate_conflicts
    if conflicts:
        return Proof(name="replicas", outcome="refuted", facts=conflicts[0])
    return Proof(name="replicas", outcome="proved")


def _judge_equality(evidence: Evidence) -> Proof:
    facts = EqualityFacts(
        changes=evidence.changes, may_round=not evidence.must_be_exact, is_same_order=evidence.is_same_order
    )
    outcome: Outcome = "open"
    if evidence.direct.kind is VerdictKind.IDENTICAL:
        outcome = "proved"
    elif evidence.is_same_order and evidence.must_be_exact:
        outcome = "refuted"
    return _proof("bit-equality", outcome, evidence.direct, facts)


def _judge_emulation(evidence: Evidence) -> Proof:
    emulated = evidence.emulated
    if emulated is None:
        return Proof(name="emulation", outcome="not tried", facts=evidence.not_emulated)
    facts = EmulationFacts(
        layout=evidence.layout, may_round=not evidence.must_be_exact, not_followed=evidence.not_followed
    )
    outcome: Outcome = "open"
    if emulated.kind is VerdictKind.IDENTICAL:
        outcome = "proved"
    elif emulated.kind not in WITHOUT_COMPARISON and evidence.must_be_exact:
        outcome = "refuted"
    return _proof("emulation", outcome, emulated, facts)


def _judge_noise(evidence: Evidence) -> Proof:
    direct = evidence.direct
    if evidence.is_same_order and evidence.must_be_exact and direct.kind is not VerdictKind.IDENTICAL:
        return Proof(name="noise", outcome="not tried", facts=NotTried(cause=NotTriedCause.NOTHING_MAY_ROUND))
    return _proof("noise", _BY_KIND[direct.kind], direct)


def _judge_wide(evidence: Evidence) -> Proof:
    wide = evidence.wide
    if wide is None:
        return Proof(name="referee", outcome="not tried", facts=evidence.no_referee)
    facts = RefereeFacts(
        worst=_worst(wide.tensors),
        worst_here=_worst(evidence.direct.tensors),
        shrinking=evidence.shrinking,
        is_same_place=is_same_place(evidence.direct, wide),
    )
    outcome: Outcome = "refuted"
    if wide.kind in WITHOUT_COMPARISON:
        outcome = "open"
    elif wide.kind in (VerdictKind.IDENTICAL, VerdictKind.ROUNDING):
        outcome = "proved"
    return _proof("referee", outcome, wide, facts)


def _proof(name: ProofName, outcome: Outcome, compared: Verdict, facts: ProofFacts | None = None) -> Proof:
    differences = () if compared.tensors is None else compared.tensors.differences
    return Proof(
        name=name,
        outcome=outcome,
        facts=facts,
        compared=compared,
        num_compared=len(differences),
        num_equal=sum(item.bit_equal for item in differences),
    )


def _worst(tensors: TensorComparison | None) -> float:
    """The largest relative difference of the judged tensors."""
    differences = () if tensors is None else tensors.differences
    return max((item.relative for item in differences if item.is_judged), default=0.0)


def judge(evidence: Evidence) -> Verdict:
    """The verdict on a candidate, with its proofs."""
    if evidence.direct.kind in WITHOUT_COMPARISON:
        return evidence.direct
    proofs = judge_proofs(evidence)
    return replace(_decide(evidence, proofs), proofs=proofs)


def _decide(evidence: Evidence, proofs: Sequence[Proof]) -> Verdict:
    direct, emulated, wide = evidence.direct, evidence.emulated, evidence.wide
    replicas, equality, emulation, noise, referee = (proof.outcome for proof in proofs)
    if equality == "proved" and replicas != "refuted":
        return direct
    # Unequal copies within the candidate's own run refute it, whatever else holds.
    if replicas == "refuted":
        return _diverged(direct, direct, RefutedBy(proof="replicas"))
    # In the baseline's order of sums nothing may round: no measure of noise excuses a difference.
    if equality == "refuted":
        return _diverged(direct, direct, RefutedBy(proof="bit-equality"))
    if emulation == "proved":
        # The reference replaces the baseline, so it must itself be one: within its noise, or the same in float64.
        vouched_by: Literal["noise", "referee"] | None = None
        if "proved" in (noise, referee):
            vouched_by = "noise" if noise == "proved" else "referee"
        why = EqualToReference(vouched_by=vouched_by)
        if vouched_by is None:
            return replace(direct, kind=VerdictKind.SUSPECT, why=why)
        return replace(direct, kind=VerdictKind.EMULATED, why=why, first=None)
    # Only the layout is another, and the reference adds in its order: a difference is no rounding.
    if emulation == "refuted" and emulated is not None:
        return _diverged(direct, emulated, RefutedBy(proof="emulation"))
    # Without the layout's own rounding a comparison shows more, and the graver of the two verdicts counts.
    sharper = _graver(evidence)
    if referee == "refuted" and wide is not None:
        if direct.kind not in (VerdictKind.DIVERGED, VerdictKind.SUSPECT) and sharper is None:
            return replace(direct, why=StaysInFloat64(otherwise=direct.why))
        is_confirmed = is_same_place(direct, wide)
        # There is next to no noise in float64, so that what comes first there is the place.
        shown_by = direct if is_confirmed else wide
        return _diverged(direct, shown_by, RefutedBy(proof="referee", is_same_place=is_confirmed))
    if sharper is not None:
        if sharper.kind is VerdictKind.DIVERGED and referee != "proved":
            return _diverged(direct, sharper, ApartFromReference(is_refuted=True))
        why_apart = ApartFromReference(is_refuted=False)
        return replace(direct, kind=VerdictKind.SUSPECT, why=why_apart, suspicions=sharper.suspicions)
    # Suspect and not diverged: both compute one function, and either this precision alone is wrong, or the noise was
    # larger than measured.
    if direct.kind is VerdictKind.DIVERGED and referee == "proved":
        return replace(direct, kind=VerdictKind.SUSPECT, why=VanishesInFloat64())
    return direct


def _graver(evidence: Evidence) -> Verdict | None:
    """The comparison with the reference in the candidate's order, where it shows more than the direct one."""
    direct, emulated = evidence.direct, evidence.emulated
    if emulated is None or evidence.must_be_exact or direct.kind not in (VerdictKind.ROUNDING, VerdictKind.SUSPECT):
        return None
    is_graver = emulated.kind is VerdictKind.DIVERGED or (
        emulated.kind is VerdictKind.SUSPECT and direct.kind is VerdictKind.ROUNDING
    )
    return emulated if is_graver else None


def _diverged(direct: Verdict, shown_by: Verdict, why: RefutedBy | ApartFromReference) -> Verdict:
    """Diverged, with the first divergence of ``shown_by``."""
    return replace(direct, kind=VerdictKind.DIVERGED, why=why, first=shown_by.first or direct.first)
