"""From the proofs of a candidate to its final verdict: every promotion and demotion of the direct verdict stands here.

Contract: pure; ``_decide`` goes down the ladder. ``suspect`` is made

- of ``diverged``, where float64 shows no difference, or where the candidate equals a reference of doubtful standing;
- of ``rounding``, where the reference in the candidate's order shows more than the baseline does, or its gradients are
  sums of finer numbers;

``rounding`` is made of ``suspect`` where nobody measured the noise, and float64 shows that both compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mock_scheduler.comparison.findings import (
    FewerBits,
    Finding,
    NarrowedState,
    OtherClip,
    OtherNorm,
    OtherRecomputation,
    OtherStart,
    OtherWeight,
)
from mock_scheduler.comparison.tensors import TensorComparison, TensorDifference
from mock_scheduler.comparison.thresholds import REPEATED_SHARE
from mock_scheduler.verdict.divergences import Divergence, earlier, from_tensor
from mock_scheduler.verdict.ladder import Evidence, is_same_place, judge_proofs
from mock_scheduler.verdict.reasons import (
    ApartFromReference,
    BeyondBounds,
    CoarserGradients,
    EqualToReference,
    NotRepeated,
    RefutedBy,
    RoundingOfPrecision,
    StaysInFloat64,
    Uncalibrated,
    VanishesInFloat64,
    WithinBounds,
)
from mock_scheduler.verdict.verdict import WITHOUT_COMPARISON, Outcome, Proof, Verdict, VerdictKind


def judge(evidence: Evidence) -> Verdict:
    """Returns the verdict on a candidate, with its proofs."""
    if evidence.direct.kind in WITHOUT_COMPARISON:
        return evidence.direct
    proofs = judge_proofs(evidence)
    return replace(_decide(evidence, proofs), proofs=proofs)


def breaks_law(verdict: Verdict) -> bool:
    """Whether a law of the candidate's own run decided: no further run changes that."""
    return verdict.kind is VerdictKind.DIVERGED and _breaks_invariant(verdict.first)


def is_vouched_for(direct: Verdict | None, emulated: Verdict | None) -> bool:
    """Whether a candidate has the bits of its reference, which is within theory: no noise has to be measured for it.

    The bounds of theory are 24 unit roundoffs of a gradient and 96 of an update, and in each later update as wide as
    the weights are apart before it; where any of them is exceeded, only noise tells whether the reference is one.

    Args:
        direct: The comparison with the baseline, by theory.
        emulated: The comparison with the reference in the candidate's order.
    """
    if direct is None or emulated is None or emulated.kind is not VerdictKind.IDENTICAL:
        return False
    return direct.kind is VerdictKind.SUSPECT and isinstance(direct.why, Uncalibrated)


def withdraw(verdict: Verdict, repeated: TensorComparison | None) -> Verdict:
    """The verdict on a candidate of which two runs were compared; unverified where they differ.

    A divergence that is far larger than what the candidate's own runs are apart stands, and so do laws of one run.

    Args:
        verdict: On the first of them.
        repeated: The first run with the second; ``None`` where there was no second.
    """
    apart = () if repeated is None else repeated.differences
    first = next((item for item in apart if not item.bit_equal), None)
    if first is None or verdict.kind in (*WITHOUT_COMPARISON, VerdictKind.IDENTICAL):
        return verdict
    if verdict.kind is VerdictKind.DIVERGED and not _is_as_large(verdict.first, apart):
        return verdict
    why = NotRepeated(first=first, otherwise=verdict.why)
    return replace(verdict, kind=VerdictKind.UNVERIFIED, why=why)


def _is_as_large(first: Divergence | None, apart: Sequence[TensorDifference]) -> bool:
    """Whether two runs of one candidate are about as far apart in a tensor as the candidate and the baseline."""
    difference = None if first is None else first.difference
    if difference is None:
        return False
    own = next((item for item in apart if item.key == difference.key), None)
    return own is not None and own.distance >= REPEATED_SHARE * difference.distance > 0.0


def _decide(evidence: Evidence, proofs: Sequence[Proof]) -> Verdict:
    direct, emulated, wide = evidence.direct, evidence.emulated, evidence.wide
    replicas, equality, emulation, inputs, noise, referee = (proof.outcome for proof in proofs)
    if equality == "proved" and replicas != "refuted":
        return direct
    # Unequal copies within the candidate's own run refute it, whatever else holds.
    if replicas == "refuted":
        law = evidence.law
        own = direct if law is None else replace(direct, first=earlier(direct.first, law))
        return _diverged(direct, own, RefutedBy(proof="replicas"))
    # A law of the candidate's own run is no matter of noise or precision, and copies of parameters are not in float64.
    if breaks_law(direct):
        return direct
    if inputs == "refuted" and evidence.law is not None:
        return _diverged(direct, replace(direct, first=evidence.law), RefutedBy(proof="equal inputs"))
    # In the baseline's order of sums nothing may round: no measure of noise excuses a difference.
    if equality == "refuted":
        return _diverged(direct, direct, RefutedBy(proof="bit-equality"))
    if emulation == "proved" and evidence.rounds_in:
        return _judge_precision(evidence)
    if emulation == "proved":
        return _equal_to_reference(evidence, noise, referee)
    # Only the layout is another, and the reference adds in its order: a difference is no rounding.
    if emulation == "refuted" and emulated is not None:
        return _diverged(direct, emulated, RefutedBy(proof="emulation"))
    # Of equal inputs one kernel makes equal values but for its rounding, whatever perturbed weights may do.
    if inputs == "refuted" and evidence.equal_inputs is not None and evidence.equal_inputs.excess is not None:
        difference, excess = evidence.equal_inputs.excess
        shown = from_tensor(replace(difference, tolerance=excess.relative_limit))
        # Beyond its noise as well, it has the bound by which two runs compared by hand are judged.
        first = direct.first if direct.first is not None and direct.first.place == shown.place else shown
        return replace(direct, kind=VerdictKind.DIVERGED, why=RefutedBy(proof="equal inputs"), first=first)
    if evidence.rounds_in and emulated is not None and emulated.kind is VerdictKind.ROUNDING and referee != "refuted":
        return _judge_precision(evidence)
    # Noise is no measure of the bits that numbers have, and another order of as many sums leaves them as they are.
    fewer = _find_fewer_bits(evidence)
    if fewer is not None and direct.kind is VerdictKind.ROUNDING:
        direct = replace(direct, kind=VerdictKind.SUSPECT, why=CoarserGradients(note=fewer))
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
    # Float64 has shown that both compute one function, which theory alone cannot.
    if isinstance(direct.why, Uncalibrated) and referee == "proved":
        return replace(direct, kind=VerdictKind.ROUNDING, why=WithinBounds(is_estimated=direct.why.is_estimated))
    return direct


def _equal_to_reference(evidence: Evidence, noise: Outcome, referee: Outcome) -> Verdict:
    direct = evidence.direct
    # The reference replaces the baseline, so it must itself be one: within its noise, or theory, or equal in float64.
    if noise == "proved":
        return replace(direct, kind=VerdictKind.EMULATED, why=EqualToReference(vouched_by="noise"), first=None)
    if isinstance(direct.why, Uncalibrated) and evidence.may_be_vouched_for and referee != "refuted":
        return replace(direct, kind=VerdictKind.EMULATED, why=EqualToReference(vouched_by="theory"), first=None)
    if referee == "proved":
        return replace(direct, kind=VerdictKind.EMULATED, why=EqualToReference(vouched_by="referee"), first=None)
    return replace(direct, kind=VerdictKind.SUSPECT, why=EqualToReference(vouched_by=None))


def _judge_precision(evidence: Evidence) -> Verdict:
    """The verdict on a candidate that computes as the baseline's code does in its precision.

    Up to the first update the two precisions are held to the noise of the coarser one. Behind it each has stored the
    update in its own type, of which no bound was measured, and the comparison in one precision stands alone.
    """
    direct, emulated = evidence.direct, evidence.emulated
    assert emulated is not None
    is_measured = isinstance(direct.why, BeyondBounds) and not direct.why.is_estimated
    if is_measured or direct.kind not in (VerdictKind.ROUNDING, VerdictKind.SUSPECT) or direct.suspicions:
        return direct
    why = RoundingOfPrecision(
        precision=evidence.rounds_in,
        is_equal=emulated.kind is VerdictKind.IDENTICAL,
        otherwise=direct.why,
    )
    return replace(direct, kind=VerdictKind.ROUNDING, why=why, first=None)


def _graver(evidence: Evidence) -> Verdict | None:
    """Returns the comparison with the reference in the candidate's order, where it shows more than the direct one."""
    direct, emulated = evidence.direct, evidence.emulated
    if (
        emulated is None
        or evidence.is_held_to_reference
        or direct.kind not in (VerdictKind.ROUNDING, VerdictKind.SUSPECT)
    ):
        return None
    is_graver = emulated.kind is VerdictKind.DIVERGED or (
        emulated.kind is VerdictKind.SUSPECT and direct.kind is VerdictKind.ROUNDING
    )
    return emulated if is_graver else None


def _breaks_invariant(item: Divergence | None) -> bool:
    """Whether the candidate's own run contradicts itself there: a weight is not its parameter rounded, a norm is not
    that of its gradients, the clip not that of the norm, state has not the bits of its type, or a recomputation is not
    its first pass. So it is where the start of one of two precisions is not the other's, rounded to nearest: in float64
    nothing is rounded, which acquits nobody.
    """
    fact = item.evidence.fact if item is not None and isinstance(item.evidence, Finding) else None
    if isinstance(fact, OtherWeight):
        return fact.side == "candidate"
    return isinstance(fact, OtherNorm | OtherClip | NarrowedState | OtherRecomputation) or (
        isinstance(fact, OtherStart) and fact.rounded is not None
    )


def _find_fewer_bits(evidence: Evidence) -> FewerBits | None:
    """Returns the candidate's gradients as sums of coarser numbers than those of as many sums in the same order."""
    # A key, as of micro-batches, may make fewer sums of them, in the baseline's order too.
    is_as_many = evidence.is_same_order and not evidence.changes.keys
    verdict = evidence.direct if is_as_many else evidence.emulated
    notes = () if verdict is None or verdict.tensors is None else verdict.tensors.notes
    return next((note for note in notes if isinstance(note, FewerBits)), None)


def _diverged(direct: Verdict, shown_by: Verdict, why: RefutedBy | ApartFromReference) -> Verdict:
    """Returns diverged, with the first divergence of ``shown_by``."""
    return replace(direct, kind=VerdictKind.DIVERGED, why=why, first=shown_by.first or direct.first)
