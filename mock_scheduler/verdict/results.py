"""Holds the results of ``mock-scheduler align``, ``compare`` and ``replicas``, as plain data for reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.comparison.bounds.bounds import Bounds
from mock_scheduler.comparison.findings import Unmatched
from mock_scheduler.comparison.tensors import LedgerComparison
from mock_scheduler.errors import ExitCode
from mock_scheduler.recording.inspection.comparison import RecordingDifferences
from mock_scheduler.run_folder.finished_run import RunSummary
from mock_scheduler.run_folder.inputs import ComparedInput
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.trace.start_report import StartReport
from mock_scheduler.verdict.consequence.figures import Consequence
from mock_scheduler.verdict.localisation import Localisation
from mock_scheduler.verdict.verdict import Verdict, worst_exit_code


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateResult:
    """Holds one candidate of an alignment.

    Args:
        overrides: Its own overrides of the baseline's configuration.
        layout: As planned.
        log_path: Its terminal output; ``None`` where it was not kept.
        run: ``None`` where it failed.
        start: What an attached run started from; ``None`` of another one.
        verdict: Compared with the baseline, with its proofs.
        entry: The module of its processes; empty where it is the baseline's.
        module: The module in the pipeline's place, whether the baseline's as well or not; empty where there is none.
        changes: Keys with values of its own; they may move a bit.
        options: Those of them that may do more than add in another order.
        emulated: The comparison with the reference in its order of sums.
        localisation: Where its divergence begins.
        consequence: The effect of its difference on the training.
        versions: Packages of other versions than the baseline's, as ``torch 2.13.0 instead of 2.14.1``.
    """

    name: str
    overrides: tuple[str, ...]
    layout: str
    log_path: Path | None
    run: RunSummary | None
    verdict: Verdict
    entry: str = ""
    module: str = ""
    changes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    emulated: Verdict | None = None
    localisation: Localisation | None = None
    consequence: Consequence | None = None
    start: StartReport | None = None
    versions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignmentTimes:
    """Where the seconds of an alignment went: runs, comparisons, and the proofs beyond them."""

    baseline_s: float
    candidates_s: float
    comparison_s: float
    emulation_s: float
    noise_s: float
    referee_s: float
    localisation_s: float
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignmentResult:
    """Holds a whole alignment run.

    Args:
        recording_dir: ``None`` where no recording is known, or it is no longer there.
        module: The baseline's module in the pipeline's place; empty where there is none.
        times: ``None`` until the alignment has ended.
    """

    config_name: str
    output_dir: Path
    recording_dir: Path | None
    bounds: Bounds
    baseline: RunSummary
    candidates: tuple[CandidateResult, ...]
    module: str = ""
    times: AlignmentTimes | None = None

    @property
    def exit_code(self) -> ExitCode:
        """Returns the exit code of the gravest verdict."""
        return worst_exit_code(candidate.verdict.kind for candidate in self.candidates)

    @property
    def passes(self) -> bool:
        """Whether every candidate passes."""
        return self.exit_code is ExitCode.ALIGNED

    def __str__(self) -> str:
        """Returns one line: ``lake: tp2 identical (emulated), pp2 diverged``."""
        return f"{self.config_name}: {', '.join(f'{item.name} {item.verdict.kind.value}' for item in self.candidates)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonResult:
    """Holds the result of ``mock-scheduler compare`` on runs, traces, metrics or recordings, the same on both sides.

    ``recordings``: all differences of two recordings; ``verdict`` has the first.
    """

    baseline: ComparedInput
    candidate: ComparedInput
    bounds: Bounds
    verdict: Verdict
    recordings: RecordingDifferences | None = None

    @property
    def exit_code(self) -> ExitCode:
        """Returns the exit code of the verdict."""
        return self.verdict.exit_code

    @property
    def passes(self) -> bool:
        """Whether the verdict passes."""
        return self.verdict.passes

    def __str__(self) -> str:
        """Returns one line: ``tp2 against baseline: diverged: first in ...``."""
        return f"{self.candidate.name} against {self.baseline.name}: {self.verdict}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaResult:
    """Holds the result of ``mock-scheduler replicas`` on one run.

    ``path``: of the run, or its URL. ``num_tensors``: that were read; ``num_copies``: by axis, copies of a tensor's
    elements that were compared with another holder's. ``conflicts``: in execution order. ``ledgers``: one for each step
    that has them. ``unmatched``: chosen kinds and patterns by which the run has nothing.
    """

    path: str
    steps: tuple[int, ...]
    num_tensors: int
    num_copies: Mapping[str, int]
    conflicts: tuple[ReplicaConflict, ...]
    ledgers: tuple[LedgerComparison, ...]
    unmatched: tuple[Unmatched, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """Diverged where copies or calls disagree; incomparable where nothing, or too little, was compared."""
        if self.conflicts or any(ledger.difference for ledger in self.ledgers):
            return ExitCode.DIVERGED
        # Without a single copy nothing was checked, and agreement would be said of nothing.
        is_compared = sum(self.num_copies.values()) and not self.unmatched
        return ExitCode.ALIGNED if is_compared else ExitCode.INCOMPARABLE
