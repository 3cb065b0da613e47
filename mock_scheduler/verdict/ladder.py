"""Makes a candidate's proofs out of its comparisons, strongest first.

Contract: pure; the comparisons are there already. ``docs/architecture.md`` lists the places of a new kind
of proof ("Where to change things").
"""

from __future__ import annotations

from dataclasses import dataclass

from mock_scheduler.comparison.findings import Finding, OtherRecomputation
from mock_scheduler.comparison.tensors import TensorComparison
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.divergences import Divergence
from mock_scheduler.verdict.reasons import (
    BIT_EQUAL,
    PROOF_NAMES,
    STRONGER_PROOF,
    NotTried,
    NotTriedCause,
    ProofName,
    Uncalibrated,
)
from mock_scheduler.verdict.verdict import (
    WITHOUT_COMPARISON,
    EmulationFacts,
    EqualInputsFacts,
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
    """Holds the runs and comparisons of a candidate whose run completed.

    Args:
        direct: Compared with the baseline, by noise or other bounds.
        num_processes: Of its run.
        changes: Everything that may move a bit.
        is_same_order: Its order of sums is the baseline's.
        must_be_exact: Nothing but the order of its sums may be another.
        emulated: Compared with the reference that adds in its order, to the last bit where ``must_be_exact``;
            ``None`` where there is none, and ``not_emulated`` says why.
        not_followed: Sums that this reference left in an order of their own.
        assumed: Sums that it made as they usually are: where it is not equal, the training's may be others.
        layout: The emulated layout.
        equal_inputs: Tensors of a closer look whose inputs are equal to those of the reference; ``None`` where there
            was none, and ``no_equal_inputs`` says why.
        wide: Both sides in float64, by bounds of rounding there; ``None`` where they were not run, and
            ``no_referee`` says why.
        shrinking: How many times smaller rounding is in float64.
        must_equal_reference: It must equal the reference in its order, and in its precision, to the last bit.
        may_be_vouched_for: By bounds of theory: a reference with its bits needs no measured noise.
        rounds_in: The coarser precision of the two, where they compute in different ones; else empty.
        law: Where a closer look found the candidate's own run to contradict itself: copies of a tensor, a
            recomputation or the clip; ``None`` where it did not, or there was none.
    """

    direct: Verdict
    num_processes: int
    changes: OwnChanges
    is_same_order: bool
    must_be_exact: bool
    emulated: Verdict | None = None
    not_followed: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    not_emulated: NotTried = BIT_EQUAL
    layout: str = ""
    equal_inputs: EqualInputsFacts | None = None
    no_equal_inputs: NotTried = STRONGER_PROOF
    wide: Verdict | None = None
    no_referee: NotTried = STRONGER_PROOF
    shrinking: float = 1.0
    must_equal_reference: bool = False
    may_be_vouched_for: bool = False
    rounds_in: str = ""
    law: Divergence | None = None

    @property
    def is_held_to_reference(self) -> bool:
        """Whether a difference from the reference in its order is no rounding."""
        return self.must_be_exact or self.must_equal_reference


def judge_proofs(evidence: Evidence) -> tuple[Proof, ...]:
    """Judges each proof by itself, in the order of ``reasons.PROOF_NAMES``."""
    return (
        _judge_replicas(evidence),
        _judge_equality(evidence),
        _judge_emulation(evidence),
        _judge_equal_inputs(evidence),
        _judge_noise(evidence),
        _judge_wide(evidence),
    )


def is_settled(direct: Verdict) -> bool:
    """Whether the comparison with the baseline needs no further run to be judged."""
    return direct.kind in WITHOUT_COMPARISON or direct.kind is VerdictKind.IDENTICAL


def complete_ladder(verdict: Verdict) -> tuple[Proof, ...]:
    """Returns all proofs, strongest first, with a reason for each missing one."""
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
    conflicts = () if tensors is None else tensors.candidate_conflicts
    findings = () if tensors is None else tensors.findings
    recomputed = [item for item in findings if isinstance(item.fact, OtherRecomputation)]
    law = None if evidence.law is None else evidence.law.evidence
    for found in (law, *conflicts, *recomputed):
        if isinstance(found, ReplicaConflict) or (
            isinstance(found, Finding) and isinstance(found.fact, OtherRecomputation)
        ):
            return Proof(name="replicas", outcome="refuted", facts=found)
    # One process holds every element once: agreement would be said of nothing.
    if evidence.num_processes == 1:
        return Proof(name="replicas", outcome="not tried", facts=NotTried(cause=NotTriedCause.ONE_PROCESS))
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
        layout=evidence.layout,
        precision=evidence.rounds_in,
        may_round=not evidence.is_held_to_reference,
        not_followed=evidence.not_followed,
        assumed=evidence.assumed,
    )
    outcome: Outcome = "open"
    if emulated.kind is VerdictKind.IDENTICAL:
        outcome = "proved"
    elif emulated.kind not in WITHOUT_COMPARISON and evidence.is_held_to_reference and not evidence.assumed:
        outcome = "refuted"
    return _proof("emulation", outcome, emulated, facts)


def _judge_equal_inputs(evidence: Evidence) -> Proof:
    facts = evidence.equal_inputs
    if facts is None:
        return Proof(name="equal inputs", outcome="not tried", facts=evidence.no_equal_inputs)
    outcome: Outcome = "open"
    if facts.excess is not None or facts.broken is not None:
        outcome = "refuted"
    elif facts.judged and facts.is_complete:
        outcome = "proved"
    return Proof(name="equal inputs", outcome=outcome, facts=facts, num_compared=len(facts.judged))


def _judge_noise(evidence: Evidence) -> Proof:
    direct = evidence.direct
    if evidence.is_same_order and evidence.must_be_exact and direct.kind is not VerdictKind.IDENTICAL:
        return Proof(name="noise", outcome="not tried", facts=NotTried(cause=NotTriedCause.NOTHING_MAY_ROUND))
    emulated = evidence.emulated
    is_proved = emulated is not None and emulated.kind is VerdictKind.IDENTICAL
    if is_proved and isinstance(direct.why, Uncalibrated) and evidence.may_be_vouched_for:
        return Proof(name="noise", outcome="not tried", facts=STRONGER_PROOF)
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
    """Returns the largest relative difference of the judged tensors."""
    differences = () if tensors is None else tensors.differences
    return max((item.relative for item in differences if item.is_judged), default=0.0)
