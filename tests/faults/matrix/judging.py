"""Whether a fault was found at the right place and called by the right name, and whether it left a clean run alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from mock_scheduler.trace.entries import PHASES
from mock_scheduler.trace.entries import Phase as TracePhase
from mock_scheduler.trace.names import CLIP
from mock_scheduler.verdict.divergences import Divergence
from tests.faults.fault import Expected, Phase, Precision
from tests.faults.matrix.evidence import OWN_PROOFS, PROOFS, Evidence, Finding

Score = Literal["whole", "half", "missed"]

_PHASES: Mapping[TracePhase, Phase] = {
    TracePhase.START: "data",
    TracePhase.DATA: "data",
    TracePhase.RECOMPUTATION: "backward",
    TracePhase.FORWARD: "forward",
    TracePhase.SCORES: "forward",
    TracePhase.LOSS: "forward",
    TracePhase.RECOMPUTATION: "backward",
    TracePhase.BACKWARD: "backward",
    TracePhase.GRADIENT: "backward",
    TracePhase.NORM: "backward",
    TracePhase.UPDATE: "update",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What came of one fault in one precision.

    findings: by proof. place: the first divergence as ``phase, update, name``; sentence: in words. is_placed,
    is_called: whether place and sentence are what the fault expects. is_loss_equal: of the first update, with the clean
    run of the same layout; ``None`` where there is no such run. is_silent: whether the silent layout's run was equal to
    the last bit. acted: by rank, how often the fault did its harm before the first update and in each. error: what
    makes it no test at all, such as a fault that never fired.
    """

    fault: str
    precision: Precision
    findings: Mapping[str, Finding]
    place: str
    sentence: str
    is_placed: bool
    is_called: bool
    is_loss_equal: bool | None
    is_silent: bool | None
    acted: Sequence[Sequence[int]]
    error: str = ""

    @property
    def is_found(self) -> bool:
        """By any of the proofs that a verdict rests on."""
        return any(self.findings[name].outcome == "found" for name in OWN_PROOFS if name in self.findings)

    @property
    def score(self) -> Score:
        """A detection that names the wrong place counts as half."""
        if not self.is_found:
            return "missed"
        return "whole" if self.is_placed else "half"


def run_proofs(evidence: Evidence) -> dict[str, Finding]:
    """All of them, by name."""
    return {name: proof(evidence) for name, proof in PROOFS.items()}


def describe_place(first: Divergence | None) -> str:
    """``backward, update 0, output_layer``; empty where nothing diverged."""
    if first is None:
        return ""
    return f"{_phase_of(first) or first.kind}, update {first.update or 0}, {first.name}"


def is_placed(first: Divergence | None, expected: Expected) -> bool:
    """Whether the first divergence is where the fault is."""
    if first is None or (_phase_of(first), first.update or 0) != (expected.phase, expected.update):
        return False
    return any(fnmatchcase(first.name, pattern) for pattern in expected.names)


def is_called(text: str, expected: Expected) -> bool:
    """Whether the words for the first divergence have the word for what it is."""
    return any(word in text for word in expected.kind.split("|"))


def _phase_of(first: Divergence) -> Phase | None:
    if first.name == CLIP:
        return "update"
    phase = PHASES.get(first.kind)  # type: ignore[arg-type]  # a metric or row has none
    return None if phase is None else _PHASES[phase]
