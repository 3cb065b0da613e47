"""Everything that the reports of an alignment say, as plain data: page, terminal and JSON are drawn from it alone.

Contract: ``alignment_builder`` makes it from a result and the folders that it names. A view that is not full has
neither figures nor what is read from folders.
"""

from __future__ import annotations

from dataclasses import dataclass

from mock_scheduler.report.alignment.curves import Curve
from mock_scheduler.report.alignment.environment import EnvironmentView
from mock_scheduler.report.alignment.heat import ErrorMap
from mock_scheduler.report.alignment.sample import SampleView
from mock_scheduler.verdict.reasons import ProofName
from mock_scheduler.verdict.verdict import Outcome, VerdictKind
from mock_scheduler.verdict.wording.legend import Tone


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofView:
    """One rung of the ladder. num_equal of num_compared tensors, where it compares any; seconds: beyond the run."""

    name: ProofName
    outcome: Outcome
    text: str
    num_compared: int
    num_equal: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLine:
    """One tensor that differs. relative, bound: as text; ratio: difference / bound in words. details: label, text."""

    step: int
    update: int
    kind: str
    name: str
    relative: str
    bound: str
    ratio: str
    exceeds: bool
    details: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateView:
    """One candidate, all that is said of it.

    entry: its module; empty where it is the baseline's. layout_name, option: of its name where that is
    ``layout.option`` or a layout; else empty. headline: the verdict in one line; reason: what else the verdict rests
    on. first_divergence: in words. proofs: all, strongest first. tensors: beyond their bound, or else nearest to it,
    under ``tensors_heading``; num_tensors: how many there are. lists: further findings by heading. consequence,
    localisation: label and text; command: opens the traces. emulated: of the comparison with the reference in its
    order. metrics: how many are equal; differing_metrics: a line for each that is not. seconds: label and seconds.
    built: what its run built, in words.
    """

    name: str
    anchor: str
    layout_name: str
    option: str
    layout: str
    overrides: tuple[str, ...]
    entry: str
    changes: tuple[str, ...]
    verdict: VerdictKind
    exit_code: int
    tone: Tone
    headline: str
    reason: str
    first_divergence: str
    proved_by: str
    smallest_error: str
    proofs: tuple[ProofView, ...]
    worst: TensorLine | None
    emulated: str
    metrics: str
    differing_metrics: tuple[str, ...]
    curves: tuple[Curve, ...]
    num_differing_metrics: int
    error_map: ErrorMap | None
    tensors_heading: str
    tensors: tuple[TensorLine, ...]
    num_tensors: int
    lists: tuple[tuple[str, tuple[str, ...], int], ...]
    localisation: tuple[tuple[str, str], ...]
    command: str
    consequence: tuple[tuple[str, str], ...]
    consequence_text: str
    environment: EnvironmentView | None
    versions: tuple[str, ...]
    seconds: tuple[tuple[str, float], ...]
    sample: SampleView | None
    built: str
    run_dir: str
    log_path: str

    @property
    def passes(self) -> bool:
        """Whether the command would end with 0 on it."""
        return self.exit_code == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignmentView:
    """A whole alignment. counts: how many candidates have which verdict, gravest first. is_matrix: whether candidates
    are named by layouts and options. must_match, facts, settings, packages: of the baseline and its recording.
    bounds: what every tensor and metric was held to. seconds: of the whole, label and seconds; empty until it ended.
    """

    config_name: str
    output_dir: str
    recording_dir: str
    exit_code: int
    tone: Tone
    counts: tuple[tuple[VerdictKind, int], ...]
    headline: str
    baseline_layout: str
    baseline_seconds: tuple[tuple[str, float], ...]
    baseline_ledger: tuple[tuple[str, str], ...]
    candidates: tuple[CandidateView, ...]
    is_matrix: bool
    must_match: tuple[tuple[str, str], ...]
    may_differ: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str], ...]
    packages: tuple[tuple[str, str], ...]
    facts: tuple[str, ...]
    notes: tuple[str, ...]
    bounds: str
    seconds: tuple[tuple[str, float], ...]
    total_s: float | None
