"""Puts a verdict into words: its one line, its reason with all proofs, the deciding ones, the smallest found error.

The legend says how to read each kind of verdict, proof and exit code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from mock_scheduler.comparison.tensors import TensorComparison
from mock_scheduler.errors import ExitCode
from mock_scheduler.support.text import count_of
from mock_scheduler.verdict.coverage import find_nearest
from mock_scheduler.verdict.localisation import Localisation
from mock_scheduler.verdict.reasons import (
    ApartFromReference,
    BeyondBounds,
    BitEqual,
    CoarserGradients,
    EqualToReference,
    NotRepeated,
    ProofName,
    RefutedBy,
    RoundingOfPrecision,
    StaysInFloat64,
    Uncalibrated,
    VanishesInFloat64,
)
from mock_scheduler.verdict.verdict import EmulationFacts, Outcome, Verdict, VerdictKind
from mock_scheduler.verdict.wording.bounds import describe_suspicion
from mock_scheduler.verdict.wording.coverage import describe_begin, describe_smallest_tensor, describe_unseen
from mock_scheduler.verdict.wording.divergences import describe_divergence
from mock_scheduler.verdict.wording.findings import describe_note
from mock_scheduler.verdict.wording.localisation import describe_localisation
from mock_scheduler.verdict.wording.proofs import describe_order, describe_proof
from mock_scheduler.verdict.wording.reasons import (
    NOT_MEASURED,
    describe_comparison,
    describe_not_repeated,
    describe_rest,
)
from mock_scheduler.verdict.wording.tensors import describe_ratio

Tone = Literal["good", "warn", "bad"]

#: Why a candidate with the bits of its reference is still some way from the baseline.
DISTANCE_OF_ORDER = "its distance from the baseline is that order's alone, and decides nothing"

#: How to read each verdict, in one sentence.
LEGEND: Mapping[VerdictKind, str] = {
    VerdictKind.IDENTICAL: "every metric, gradient, parameter and replica is equal to the last bit",
    VerdictKind.EMULATED: "equal to the last bit to a reference that adds in the candidate's order; "
    f"{DISTANCE_OF_ORDER}",
    VerdictKind.ROUNDING: "differs, and nothing is beyond its bound",
    VerdictKind.SUSPECT: "within its bounds, but with a systematic slope, drift or concentrated in one place; or no "
    "noise was measured",
    VerdictKind.DIVERGED: "something is beyond its bound or missing, or replicas disagree",
    VerdictKind.INCOMPARABLE: "the run failed, or nothing could be compared",
    VerdictKind.UNVERIFIED: "the runs are not shown to be deterministic, or two of a candidate differ, so a difference "
    "proves nothing",
}

#: Whether a verdict is good news, on a page and in a terminal.
TONES: Mapping[VerdictKind, Tone] = {
    VerdictKind.IDENTICAL: "good",
    VerdictKind.EMULATED: "good",
    VerdictKind.ROUNDING: "good",
    VerdictKind.SUSPECT: "warn",
    VerdictKind.DIVERGED: "bad",
    VerdictKind.INCOMPARABLE: "warn",
    VerdictKind.UNVERIFIED: "warn",
}

#: What each proof shows where it holds, strongest first.
PROOF_MEANINGS: Mapping[ProofName, str] = {
    "replicas": "ranks that must hold the same bits do",
    "bit-equality": "every tensor has the baseline's bits",
    "emulation": "every tensor has the bits of a reference that adds in the candidate's order",
    "equal inputs": "of inputs equal to the last bit, no tensor differs by more than one kernel rounds",
    "noise": "no difference is larger, more systematic or more concentrated than one unit of rounding makes it",
    "referee": "in float64 the two sides agree as two orders of the same sums do",
}

#: A sign for each outcome, for where colour alone would tell them apart.
PROOF_MARKS: Mapping[Outcome, str] = {"proved": "✓", "refuted": "✗", "open": "?", "not tried": "–"}

#: How to read the exit code of an alignment.
EXIT_MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.ALIGNED: "every candidate passes",
    ExitCode.DIVERGED: "at least one candidate diverged",
    ExitCode.SUSPECT: "at least one candidate is suspect, and none diverged",
    ExitCode.INCOMPARABLE: "at least one candidate could not be compared",
    ExitCode.UNVERIFIED: "at least one candidate is not shown to be deterministic",
}


#: Stands before what a comparison did not look at.
NOT_LOOKED_AT = "not looked at"

_AGAINST = "against the baseline: "


def describe_sentence(verdict: Verdict) -> str:
    """The first divergence in one sentence; empty where there is none. Figures of the runs in float64 are called so."""
    if verdict.first is None:
        return ""
    why = verdict.why
    is_wide = isinstance(why, RefutedBy) and why.proof == "referee" and not why.is_same_place
    return f"{'in float64, ' if is_wide else ''}{describe_divergence(verdict.first)}"


def describe_reason(verdict: Verdict) -> str:
    """Returns the whole reason, the deciding proof first."""
    why = verdict.why
    match why:
        case RefutedBy():
            return _describe_refuted(verdict, why)
        case EqualToReference():
            return _describe_equal(verdict, why)
        case ApartFromReference():
            order = f"against {describe_order(_layout(verdict))}"
            if why.is_refuted:
                return f"{order}, first divergence: {describe_sentence(verdict)}"
            apart = verdict.proof("emulation")
            shown = "" if apart is None or apart.compared is None else describe_comparison(apart.compared)
            return f"{order}: {shown}; {_describe_direct(verdict)}"
        case VanishesInFloat64():
            return f"{_describe_named(verdict, 'referee')}; {_describe_direct(verdict)}"
        case CoarserGradients(note=note):
            return f"within the bounds, but {describe_note(note)}"
        case NotRepeated(first=apart, otherwise=otherwise):
            return f"{describe_not_repeated(apart)}; {describe_reason(replace(verdict, why=otherwise))}"
        case StaysInFloat64():
            return f"{_describe_direct(verdict)}; {_describe_named(verdict, 'referee')}"
        case RoundingOfPrecision():
            return f"{_describe_named(verdict, 'emulation')}; {_AGAINST}{_describe_direct(verdict)}"
        case _:
            return describe_comparison(verdict)


def describe_beside_proofs(verdict: Verdict) -> str:
    """Returns the rest of a reason beside its first divergence and its proofs."""
    why = verdict.why
    if not verdict.proofs:
        return describe_rest(verdict)
    match why:
        case EqualToReference() if why.vouched_by is None:
            return "the reference that adds in its order is itself not within the noise of the baseline"
        case ApartFromReference():
            return f"judged against {describe_order(_layout(verdict))}, which leaves no rounding of the layout"
        case _:
            return ""


def describe_proved_by(verdict: Verdict) -> str:
    """Returns the deciding proofs: ``emulation``; ``noise, referee``; of a divergence ``refuted by noise``."""
    if verdict.kind is VerdictKind.IDENTICAL:
        return "bit-equality"
    if verdict.kind is VerdictKind.EMULATED:
        return ", ".join(_list_named(verdict, "proved", ("emulation",))) or "–"
    if verdict.passes:
        return ", ".join(_list_named(verdict, "proved", ("emulation", "noise", "referee"))) or "–"
    against = _list_named(verdict, "refuted", ("replicas", "emulation", "equal inputs", "noise", "referee"))
    return f"refuted by {', '.join(against)}" if against else "–"


def write_headline(
    verdict: Verdict, *, emulated: Verdict | None = None, localisation: Localisation | None = None
) -> str:
    """The verdict in one line of plain words, with what it did not look at.

    Args:
        emulated: The comparison with the reference in the candidate's order of sums, where there is one.
        localisation: Where the divergence begins, by further runs.
    """
    finding = ": ".join(filter(None, (describe_begin(verdict.unseen), _write_finding(verdict, emulated, localisation))))
    unseen = describe_unseen(verdict.unseen) if verdict.passes else ""
    return f"{finding}; {NOT_LOOKED_AT}: {unseen}" if unseen else finding


def _write_finding(verdict: Verdict, emulated: Verdict | None, localisation: Localisation | None) -> str:
    match verdict.kind:
        case VerdictKind.IDENTICAL:
            return f"every bit is equal{_describe_extent(verdict.tensors)}"
        case VerdictKind.EMULATED:
            compared = None if emulated is None else emulated.tensors
            extent = _describe_extent(compared or verdict.tensors)
            return f"every bit is equal to a reference that adds in its order{extent}"
        case VerdictKind.ROUNDING:
            if isinstance(verdict.why, RoundingOfPrecision):
                return _write_precision(verdict, verdict.why)
            worst = find_nearest(verdict.tensors)
            nearest = "" if worst is None else f"; nearest is {worst.key.describe()} at {describe_ratio(worst)}"
            return f"differs by no more than rounding does{nearest}"
        case VerdictKind.SUSPECT:
            return _write_suspect(verdict)
        case VerdictKind.DIVERGED:
            if localisation is not None:
                return describe_localisation(localisation)
            return describe_sentence(verdict) or describe_reason(verdict)
        case _:
            return describe_reason(verdict)


def describe_smallest_error(verdict: Verdict) -> str:
    """Returns the smallest detectable error, where the verdict passes; empty else."""
    if verdict.kind in (VerdictKind.IDENTICAL, VerdictKind.EMULATED):
        is_recorded = isinstance(verdict.why, BitEqual) and verdict.why.by_fingerprints
        return "one changed bit, by the fingerprints as recorded" if is_recorded else "one changed bit"
    if isinstance(verdict.why, RoundingOfPrecision) and verdict.why.is_equal:
        return "one changed bit beside the baseline's code in its precision"
    if verdict.kind is not VerdictKind.ROUNDING or verdict.tensors is None:
        return ""
    return describe_smallest_tensor(verdict.tensors)


def _write_precision(verdict: Verdict, why: RoundingOfPrecision) -> str:
    """Whose rounding is between two precisions, and from where on it grows beyond what was measured."""
    how = "every bit is equal to" if why.is_equal else "within the noise of"
    text = f"differs by the rounding of {why.precision}: {how} the baseline's code in the candidate's precision"
    tensors = verdict.tensors
    if tensors is None or tensors.last_measured is None:
        return text
    step, update = tensors.last_measured
    before = [item for item in tensors.differences if (item.key.step, item.key.update) <= (step, update)]
    within = f"{count_of(len(before), 'tensor')} of the first update within the noise of {why.precision}"
    beyond = [item for item in tensors.exceeding if (item.key.step, item.key.update) > (step, update)]
    if not beyond:
        return f"{text}, {within}"
    largest = max(beyond, key=lambda item: item.relative / item.tolerance if item.tolerance else 0.0)
    return (
        f"{text}, {within}; from the next update on, where the update itself is stored in another type, "
        f"{count_of(len(beyond), 'tensor')} beyond it, {largest.key.describe()} by {describe_ratio(largest)}"
    )


def _write_suspect(verdict: Verdict) -> str:
    noise, referee = verdict.proof("noise"), verdict.proof("referee")
    if noise is not None and noise.outcome == "refuted":
        is_excused = referee is not None and referee.outcome == "proved" and verdict.first is not None
        sentence = describe_sentence(verdict)
        return f"beyond its bounds, and not in float64: {sentence}" if is_excused else describe_reason(verdict)
    if isinstance(verdict.why, BeyondBounds):
        return f"beyond an estimated bound only: {describe_sentence(verdict)}"
    if isinstance(verdict.why, Uncalibrated):
        worst = find_nearest(verdict.tensors)
        nearest = "" if worst is None else f"; nearest is {worst.key.describe()} at {describe_ratio(worst)}"
        return f"{NOT_MEASURED}; it is within bounds of theory{nearest}"
    if verdict.suspicions:
        return f"within its bounds, and yet {describe_suspicion(verdict.suspicions[0])}"
    if noise is not None and noise.outcome == "open":
        return f"within its bounds, and yet {describe_proof(noise)}"
    return describe_reason(verdict)


def _describe_refuted(verdict: Verdict, why: RefutedBy) -> str:
    direct = _describe_direct(verdict)
    found = _describe_named(verdict, why.proof)
    match why.proof:
        case "bit-equality":
            return f"{found}; {direct}"
        case "equal inputs":
            return f"{found}; {_AGAINST}{_describe_named(verdict, 'noise')}"
        case "emulation":
            noise = _describe_named(verdict, "noise")
            return f"{found}; {_AGAINST}{noise}; first divergence: {describe_sentence(verdict)}"
        case "replicas" if verdict.tensors is None or not verdict.tensors.candidate_conflicts:
            return f"{found}; {_AGAINST}{direct}"
        case "referee":
            return f"{direct}; {found}" if why.is_same_place else f"{found}; {_AGAINST}{direct}"
        case _:
            return direct


def _describe_equal(verdict: Verdict, why: EqualToReference) -> str:
    emulation, noise = _describe_named(verdict, "emulation"), _describe_named(verdict, "noise")
    if why.vouched_by == "noise":
        return f"{emulation}; {noise}"
    if why.vouched_by == "theory":
        return f"{emulation}; that reference is within bounds of theory around the baseline"
    if why.vouched_by == "referee":
        return f"{emulation}; {_describe_named(verdict, 'referee')}; {_AGAINST}{noise}"
    return f"{emulation}, but that reference is itself not within the noise of the baseline: {noise}"


def _describe_direct(verdict: Verdict) -> str:
    """The reason of the comparison with the baseline, before any other proof was judged."""
    equality = verdict.proof("bit-equality")
    if equality is None or equality.compared is None:
        return ""
    return describe_comparison(equality.compared)


def _describe_named(verdict: Verdict, name: ProofName) -> str:
    proof = verdict.proof(name)
    return "" if proof is None else describe_proof(proof)


def _layout(verdict: Verdict) -> str:
    proof = verdict.proof("emulation")
    return proof.facts.layout if proof is not None and isinstance(proof.facts, EmulationFacts) else "its layout"


def _list_named(verdict: Verdict, outcome: Outcome, names: Sequence[ProofName]) -> list[str]:
    return [proof.name for proof in verdict.proofs if proof.outcome == outcome and proof.name in names]


def _describe_extent(tensors: TensorComparison | None) -> str:
    if tensors is None:
        return ""
    return f", in {count_of(len(tensors.differences), 'tensor')} over {count_of(len(tensors.steps), 'step')}"
