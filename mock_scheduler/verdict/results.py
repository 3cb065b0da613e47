"""What an alignment run found, as plain data for reports; and the comparison of two finished runs by their folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.compare.bounds.bounds import Bounds
from mock_scheduler.compare.pairing.selection import EVERYTHING, Selection
from mock_scheduler.compare.tensors import JUDGED_KINDS, LedgerComparison
from mock_scheduler.compare.walk.metrics import compare_metrics, load_metrics
from mock_scheduler.compare.walk.steps import OnKey
from mock_scheduler.compare.walk.traces import compare_trace_folders
from mock_scheduler.errors import ExitCode
from mock_scheduler.recording.inspection.comparison import RecordingDifferences
from mock_scheduler.run_folder.finished_run import RunSummary
from mock_scheduler.run_folder.inputs import ComparedInput
from mock_scheduler.support.run_files import METRICS_FILE, TRACE_FOLDER
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.proofs import Consequence, Localisation, Proof
from mock_scheduler.verdict.verdict import Verdict, decide


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateResult:
    """One candidate: what it overrides, its planned layout, its run (``None`` where it failed) and the verdict.

    ``entry``: the module that runs in the pipeline's place; empty where it is the baseline's. ``log_path``: its
    terminal output; ``None`` where that was not kept. ``alignment``: compared with the baseline. ``changes``: the keys
    that may move a bit. ``proofs``: what the verdict rests on, strongest first. ``emulated``: the comparison with the
    reference that adds in its order. ``localisation``: of a divergence; ``consequence``: of a difference. ``versions``:
    of packages that are not the baseline's, as ``torch 2.13.0 instead of 2.14.1``.
    """

    name: str
    overrides: tuple[str, ...]
    layout: str
    log_path: Path | None
    run: RunSummary | None
    alignment: Verdict
    entry: str = ""
    changes: tuple[str, ...] = ()
    proofs: tuple[Proof, ...] = ()
    emulated: Verdict | None = None
    localisation: Localisation | None = None
    consequence: Consequence | None = None
    versions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignmentTimes:
    """Where the seconds of an alignment went: runs, comparisons, and what proofs cost beyond them."""

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
    """A whole alignment run. ``recording_dir``: ``None`` where no recording is known, or it is no longer there.

    ``times``: ``None`` until it has ended.
    """

    config_name: str
    output_dir: Path
    recording_dir: Path | None
    bounds: Bounds
    baseline: RunSummary
    candidates: tuple[CandidateResult, ...]
    times: AlignmentTimes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonResult:
    """What ``mock-scheduler compare`` found: of runs, traces, metrics or recordings, the same on both sides.

    ``recordings``: of two recordings, all that differs between them; ``alignment`` has one finding per step.
    """

    baseline: ComparedInput
    candidate: ComparedInput
    bounds: Bounds
    alignment: Verdict
    recordings: RecordingDifferences | None = None

    @property
    def exit_code(self) -> ExitCode:
        """The verdict's."""
        return self.alignment.verdict.exit_code


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaResult:
    """What ``mock-scheduler replicas`` found in one run.

    ``num_tensors``: that were read; ``num_copies``: by axis, copies of a tensor's elements that were compared with
    another holder's. ``conflicts``: in execution order. ``ledgers``: one for each step that has them.
    """

    path: Path
    steps: tuple[int, ...]
    num_tensors: int
    num_copies: Mapping[str, int]
    conflicts: tuple[ReplicaConflict, ...]
    ledgers: tuple[LedgerComparison, ...]

    @property
    def exit_code(self) -> ExitCode:
        """Diverged where copies or calls disagree, incomparable where nothing is held twice, else aligned."""
        if self.conflicts or any(ledger.difference for ledger in self.ledgers):
            return ExitCode.DIVERGED
        return ExitCode.ALIGNED if sum(self.num_copies.values()) else ExitCode.INCOMPARABLE


def compare_runs(
    baseline_dir: Path,
    candidate_dir: Path,
    *,
    bounds: Bounds,
    selection: Selection = EVERYTHING,
    has_metrics: bool = True,
    on_key: OnKey | None = None,
) -> Verdict:
    """The verdict on two finished runs, out of their ``metrics.jsonl`` and ``trace/``.

    ``has_metrics``: whether metrics are compared. Unless kinds or names are chosen, gradients and parameters must be
    among what was compared. Raises ``AlignmentError`` or ``TraceError`` where the files cannot be read.
    """
    metrics = None
    if has_metrics:
        logs = [load_metrics(folder / METRICS_FILE) for folder in (baseline_dir, candidate_dir)]
        metrics = compare_metrics(logs[0], logs[1], bounds=bounds, selection=selection)
    tensors = compare_trace_folders(
        baseline_dir / TRACE_FOLDER,
        candidate_dir / TRACE_FOLDER,
        bounds=bounds,
        selection=selection,
        on_key=on_key,
    )
    is_chosen = selection.kinds is not None or selection.patterns != EVERYTHING.patterns
    return decide(metrics, tensors, bounds=bounds, required=() if is_chosen else JUDGED_KINDS, selection=selection)
