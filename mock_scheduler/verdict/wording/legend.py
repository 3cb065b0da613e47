"""How to read a verdict and its proofs: one sentence, one tone and one mark for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mock_scheduler.errors import ExitCode
from mock_scheduler.verdict.reasons import ProofName
from mock_scheduler.verdict.verdict import Outcome, VerdictKind

Tone = Literal["good", "warn", "bad"]

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
