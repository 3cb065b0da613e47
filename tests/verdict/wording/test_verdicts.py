"""The one line of a verdict that is no plain pass or failure, and what a proof says beside it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mock_scheduler.comparison.findings import Fact, Finding, OnlyIn, OtherShape
from mock_scheduler.comparison.noise.suspicions import ScaledGradients, Suspicion
from mock_scheduler.comparison.tensors import TensorComparison
from mock_scheduler.verdict.divergences import Divergence
from mock_scheduler.verdict.reasons import (
    ApartFromReference,
    BeyondBounds,
    EqualToReference,
    NotDeterministic,
    NotExplainedByNoise,
    Reason,
    RefutedBy,
    StillOpen,
    Undecided,
    VanishesInFloat64,
)
from mock_scheduler.verdict.verdict import (
    EmulationFacts,
    EqualityFacts,
    OwnChanges,
    Proof,
    RefereeFacts,
    Verdict,
    VerdictKind,
)
from mock_scheduler.verdict.wording.proofs import describe_proof
from mock_scheduler.verdict.wording.reasons import describe_rest
from mock_scheduler.verdict.wording.verdicts import describe_beside_proofs, describe_reason, write_headline

HERE, ELSEWHERE = OtherShape(baseline=(2,), candidate=(3,)), OnlyIn(side="baseline")
SENTENCE = "parameter of w at step 0, update 0 has shape [2] in the baseline and [3] in the candidate"
SENTENCE_ELSEWHERE = "parameter of w at step 0, update 0 was traced by the baseline but not by the candidate"
NOTHING = TensorComparison(
    steps=(), differences=(), findings=(), baseline_conflicts=(), candidate_conflicts=(), notes=()
)
REST = "beyond their bounds: 0 of 0 tensors"


def divergence(fact: Fact = HERE) -> Divergence:
    finding = Finding(kind="parameter", step=0, update=0, name="w", fact=fact)
    return Divergence(step=0, update=0, kind="parameter", name="w", evidence=finding)


def beyond(fact: Fact = HERE) -> Verdict:
    """A comparison with one difference beyond its bound."""
    return Verdict(kind=VerdictKind.DIVERGED, why=BeyondBounds(), first=divergence(fact), tensors=NOTHING)


EQUALITY = Proof(
    name="bit-equality",
    outcome="open",
    facts=EqualityFacts(changes=OwnChanges(keys=("precision",)), may_round=True, is_same_order=False),
    compared=beyond(),
    num_compared=93,
    num_equal=17,
)
NOISE = Proof(name="noise", outcome="refuted", compared=beyond())


def referee(outcome: str, *, compared: Verdict, is_same_place: bool = False) -> Proof:
    facts = RefereeFacts(worst=1e-9, worst_here=1e-9, shrinking=5e8, is_same_place=is_same_place)
    return Proof(name="referee", outcome="proved" if outcome == "proved" else "refuted", facts=facts, compared=compared)


def suspect(*proofs: Proof, why: Reason | None = None, first: Divergence | None = None) -> Verdict:
    """A verdict that is suspect, without traces."""
    return Verdict(kind=VerdictKind.SUSPECT, why=why or NotExplainedByNoise(), first=first, proofs=proofs)


def test_what_float64_excuses_is_not_called_within_its_bounds() -> None:
    """It said: within its bounds, and yet 17 of 93 tensors are equal to the last bit."""
    proofs = (EQUALITY, NOISE, referee("proved", compared=beyond()))
    found = suspect(*proofs, why=VanishesInFloat64(), first=divergence())
    assert write_headline(found) == f"beyond its bounds, and not in float64: {SENTENCE}"


def test_what_noise_leaves_open_is_said_and_no_other_proof_takes_its_place() -> None:
    open_noise = Proof(
        name="noise", outcome="open", compared=Verdict(kind=VerdictKind.SUSPECT, why=Undecided(num_tensors=2))
    )
    assert write_headline(suspect(EQUALITY, open_noise)).startswith(
        "within its bounds, and yet sketches cannot tell for 2 tensors on which side of its bound it is"
    )


def test_a_suspicion_is_the_headline_of_what_is_within_its_bounds() -> None:
    scaled = ScaledGradients(ratio=0.9991, factor=None, num_tensors=12, z=-6.5, noise_z=1.5)
    slope = Suspicion(test="slope", step=0, update=0, name="", value=9e-4, limit=1e-4, fact=scaled)
    found = Verdict(kind=VerdictKind.SUSPECT, why=NotExplainedByNoise(), suspicions=(slope,), proofs=(EQUALITY,))
    assert write_headline(found) == (
        "within its bounds, and yet step 0, update 0: the candidate's gradients together are 0.9991 times the "
        "baseline's (median of 12 slopes; z -6.5, of perturbed runs at most 1.5), where noise makes at most 1.0e-04 of "
        "it"
    )


def test_what_is_beyond_an_estimate_is_not_called_within_its_bounds() -> None:
    """It said: within its bounds, and yet beyond an estimated bound only."""
    found = suspect(why=BeyondBounds(is_estimated=True), first=divergence())
    assert write_headline(found) == f"beyond an estimated bound only: {SENTENCE}"


def test_nothing_is_left_of_a_reason_that_is_sentence_and_proofs() -> None:
    """``in its own precision:`` stood there, with nothing behind it."""
    elsewhere = divergence(ELSEWHERE)
    own = referee("refuted", compared=beyond(ELSEWHERE))
    why = RefutedBy(proof="referee")
    found = Verdict(kind=VerdictKind.DIVERGED, why=why, first=elsewhere, proofs=(EQUALITY, NOISE, own))
    assert describe_beside_proofs(found) == ""
    shrinks = "in float64 it does not shrink as rounding does: the largest difference is 1.0e-09 in float64 and 1.0e-09"
    assert describe_proof(own, said=elsewhere) == f"{shrinks} here; first divergence: as said above"
    assert describe_reason(found) == (
        f"{shrinks} here; first divergence: {SENTENCE_ELSEWHERE}; against the baseline: first divergence: "
        f"{SENTENCE}; {REST}"
    )


def test_figures_of_float64_are_called_so() -> None:
    """They stood in the headline as if the runs themselves were as near to each other."""
    own = referee("refuted", compared=beyond(ELSEWHERE))
    found = Verdict(
        kind=VerdictKind.DIVERGED,
        why=RefutedBy(proof="referee"),
        first=divergence(ELSEWHERE),
        proofs=(EQUALITY, NOISE, own),
    )
    assert write_headline(found) == f"in float64, {SENTENCE_ELSEWHERE}"
    same = replace(found, why=RefutedBy(proof="referee", is_same_place=True), first=divergence())
    assert write_headline(same) == SENTENCE


@pytest.mark.parametrize(
    ("worst", "worst_here", "text"),
    [
        (math.inf, math.inf, "in float64 as here, a tensor is 0 on one side alone"),
        (math.inf, 0.5, "a tensor is 0 on one side alone in float64, and the largest difference is 5.0e-01 here"),
        (0.5, math.inf, "the largest difference is 5.0e-01 in float64, and a tensor is 0 on one side alone here"),
    ],
)
def test_what_is_infinitely_far_has_no_number(worst: float, worst_here: float, text: str) -> None:
    """It said: the largest difference is inf in float64 and inf here."""
    facts = RefereeFacts(worst=worst, worst_here=worst_here, shrinking=5e8, is_same_place=True)
    proof = Proof(name="referee", outcome="refuted", facts=facts, compared=beyond())
    said = f"in float64 it does not shrink as rounding does: {text}; it begins at the same place"
    assert describe_proof(proof) == said


def test_what_has_no_number_in_either_precision_has_no_ratio() -> None:
    """NaN was: the largest difference is 0.0e+00 in float64 and 0.0e+00 here."""
    facts = RefereeFacts(worst=0.0, worst_here=0.0, shrinking=5e8, is_same_place=True)
    proof = Proof(name="referee", outcome="refuted", facts=facts, compared=beyond())
    said = "in float64 it is there as well, and no size that could shrink; it begins at the same place"
    assert describe_proof(proof) == said


def test_a_reference_that_is_none_is_said_beside_the_proofs() -> None:
    facts = EmulationFacts(layout="tp2 pp1 dp1", may_round=False)
    emulation = Proof(name="emulation", outcome="proved", facts=facts, compared=Verdict(
        kind=VerdictKind.IDENTICAL, why=NotExplainedByNoise(), tensors=NOTHING))  # fmt: skip
    found = suspect(EQUALITY, emulation, NOISE, why=EqualToReference(vouched_by=None), first=divergence())
    assert describe_beside_proofs(found) == (
        "the reference that adds in its order is itself not within the noise of the baseline"
    )
    apart = suspect(EQUALITY, emulation, NOISE, why=ApartFromReference(is_refuted=False))
    assert describe_beside_proofs(apart) == (
        "judged against a reference in one process that adds in the order of tp2 pp1 dp1, which leaves no rounding of "
        "the layout"
    )


def test_the_first_divergence_is_said_once_and_what_follows_is_not_taken_for_it() -> None:
    assert describe_proof(NOISE, said=divergence()) == f"first divergence: as said above; {REST}"
    assert describe_proof(NOISE, said=divergence(ELSEWHERE)) == f"first divergence: {SENTENCE}; {REST}"
    assert describe_rest(beyond()) == REST


def test_without_determinism_the_reason_of_the_comparison_stands_behind_that() -> None:
    found = Verdict(
        kind=VerdictKind.UNVERIFIED, why=NotDeterministic(otherwise=BeyondBounds()), first=divergence(), tensors=NOTHING
    )
    prefix = "without DETERMINISTIC_MODE=1 two equal runs may differ as much: "
    assert describe_reason(found) == f"{prefix}first divergence: {SENTENCE}; {REST}"
    assert describe_rest(found) == f"{prefix}{REST}"


def test_a_verdict_in_one_line_names_the_place_or_what_was_compared() -> None:
    assert str(beyond()) == "diverged: first in parameter of w at step 0, update 0"
    assert str(suspect()) == "suspect: compared nothing"
    waiting = Verdict(kind=VerdictKind.INCOMPARABLE, why=StillOpen(missing="run"))
    assert describe_reason(waiting) == "not run yet: the alignment is still going, or was interrupted"
    assert (waiting.exit_code, waiting.passes) == (3, False)
