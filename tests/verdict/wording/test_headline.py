"""The one line of a verdict that is no plain pass or failure, and what a proof says beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mock_scheduler.verdict.proofs import Proof
from mock_scheduler.verdict.results import CandidateResult
from mock_scheduler.verdict.verdict import Verdict, VerdictKind
from mock_scheduler.verdict.wording.headline import describe_proof, describe_reason, write_headline

SENTENCE = "step 0, update 0, optimizer: a parameter differs by 2.57e-06 (bound 2.2e-06)"


def suspect(*proofs: Proof, sentence: str | None = None) -> CandidateResult:
    """A candidate that is suspect, without traces."""
    alignment = Verdict(
        verdict=VerdictKind.SUSPECT,
        reason="what the verdict rests on",
        first_divergence=None,
        metrics=None,
        tensors=None,
        sentence=sentence,
    )
    return CandidateResult(
        name="mine",
        overrides=(),
        layout="tp2 pp1 dp1",
        log_path=Path("run.log"),
        run=None,
        alignment=alignment,
        changes=(),
        proofs=proofs,
        emulated=None,
        localisation=None,
        consequence=None,
        versions=(),
    )


def test_what_float64_excuses_is_not_called_within_its_bounds() -> None:
    """It said: within its bounds, and yet 17 of 93 tensors are equal to the last bit."""
    equality = Proof(name="bit-equality", outcome="open", text="17 of 93 tensors are equal to the last bit")
    noise = Proof(name="noise", outcome="refuted", text=f"first divergence: {SENTENCE}; beyond the noise")
    referee = Proof(name="referee", outcome="proved", text="in float64 both compute the same")
    found = write_headline(suspect(equality, noise, referee, sentence=SENTENCE))
    assert found == f"beyond its bounds, and not in float64: {SENTENCE}"
    assert write_headline(suspect(equality, noise, sentence=SENTENCE)) == "what the verdict rests on"


def test_what_noise_leaves_open_is_said_and_no_other_proof_takes_its_place() -> None:
    equality = Proof(name="bit-equality", outcome="open", text="17 of 93 tensors are equal to the last bit")
    noise = Proof(name="noise", outcome="open", text="gradients have a slope of 0.9991")
    assert write_headline(suspect(equality, noise)) == "within its bounds, and yet gradients have a slope of 0.9991"
    assert write_headline(suspect(equality)) == "what the verdict rests on"


def test_nothing_is_left_of_a_reason_that_is_sentence_and_proofs() -> None:
    """``in its own precision:`` stood there, with nothing behind it."""
    noise = Proof(name="noise", outcome="refuted", text=f"first divergence: {SENTENCE}; beyond the noise")
    referee = Proof(name="referee", outcome="refuted", text="in float64 it does not shrink")
    candidate = suspect(noise, referee, sentence="in float64 elsewhere")
    reason = f"{referee.text}; against the baseline: {noise.text}; first divergence: in float64 elsewhere"
    assert describe_reason(replace(candidate, alignment=replace(candidate.alignment, reason=reason))) == ""
    named = replace(referee, text=f"{referee.text}; first divergence: in float64 elsewhere")
    assert describe_proof(named, candidate.alignment) == f"{referee.text}; first divergence: as said above"


def test_the_first_divergence_is_said_once_and_what_follows_is_not_taken_for_it() -> None:
    text = f"first divergence: {SENTENCE}; first metric: approx_kl from step 0 on: 0.1 in the baseline"
    proof = Proof(name="noise", outcome="refuted", text=text)
    found = describe_proof(proof, suspect(proof, sentence=SENTENCE).alignment)
    assert found == ("first divergence: as said above; first metric: approx_kl from step 0 on: 0.1 in the baseline")
