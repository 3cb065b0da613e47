"""Compares what lies at two paths: runs, traces, metrics or recordings, however they came there.

Contract: reads, starts nothing and writes nothing. Two runs must have trained on the same rollouts: each states the
digest of every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mock_scheduler.compare.bounds.bounds import Bounds
from mock_scheduler.compare.pairing.selection import EVERYTHING, Selection
from mock_scheduler.compare.walk.metrics import compare_metrics, load_metrics
from mock_scheduler.compare.walk.steps import OnKey
from mock_scheduler.compare.walk.traces import compare_trace_folders, trace_level
from mock_scheduler.errors import ConfigError
from mock_scheduler.recording.inspection.comparison import RecordingDifferences, compare_recordings
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.run_folder.inputs import ComparedInput, OpenedInput, check_steps, find_trace, open_inputs
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.verdict.compare_runs import judge_recordings, judge_runs
from mock_scheduler.verdict.comparison_bounds import resolve_bounds
from mock_scheduler.verdict.decision import decide
from mock_scheduler.verdict.replicas import check_replicas
from mock_scheduler.verdict.results import ComparisonResult, ReplicaResult
from mock_scheduler.verdict.verdict import Verdict

_NUM_ROWS = 5


def compare_paths(
    baseline: Path,
    candidate: Path,
    *,
    selection: Selection = EVERYTHING,
    tolerance: Sequence[str] = (),
    noise: Sequence[Path] = (),
    has_metrics: bool = True,
    on_key: OnKey | None = None,
) -> ComparisonResult:
    """Compare two runs, traces, metrics or recordings.

    Args:
        selection: Steps, kinds and names.
        tolerance: Bounds ``name=value`` over the candidate's own.
        noise: A file of the baseline's measured noise, or perturbed runs of it.
        has_metrics: Whether metrics of runs are compared.
        on_key: Called with the number of compared tensors, or steps, and of all.

    Raises:
        ConfigError: A side cannot be compared, the sides are of different kinds, a bound or the noise is none, or none
            of the chosen steps is present.
        AlignmentError: A run is not completed, or has no trace.
        TraceError, RecordingError: A file cannot be read.
    """
    opened = open_inputs((baseline, candidate))
    check_steps([item.side for item in opened], selection.steps)
    bounds = resolve_bounds(opened, tolerance, noise)
    verdict, recordings = _judge(opened, bounds, selection, has_metrics=has_metrics, on_key=on_key)
    return ComparisonResult(
        baseline=opened[0].side, candidate=opened[1].side, bounds=bounds, verdict=verdict, recordings=recordings
    )


def check_replicas_at(
    path: Path, *, selection: Selection = EVERYTHING, verify: bool = False, on_key: OnKey | None = None
) -> ReplicaResult:
    """Check all copies within one run or trace bit for bit.

    Args:
        verify: First read all of the trace, whatever is selected, and check every SHA-256.

    Raises:
        ConfigError: There is no trace of whole tensors, or none of the chosen steps is present.
        TraceError: A file cannot be read or was changed.
    """
    trace_dir = find_trace(path)
    if trace_level(trace_dir) != "full":
        raise ConfigError(
            f"{trace_dir} has sketches only, whose copies are checked by compare; trace the run with trace.level=full"
        )
    check_steps([ComparedInput(name=str(path), path=trace_dir, kind="trace", level="full", run=None)], selection.steps)
    with open_trace(trace_dir) as reader:
        if verify:
            reader.verify()
        return check_replicas(reader, path, selection=selection, on_key=on_key)


def _judge(
    opened: tuple[OpenedInput, OpenedInput],
    bounds: Bounds,
    selection: Selection,
    *,
    has_metrics: bool,
    on_key: OnKey | None,
) -> tuple[Verdict, RecordingDifferences | None]:
    baseline, candidate = (item.side for item in opened)
    if baseline.kind == "recording":
        readers = RecordingReader(str(baseline.path)), RecordingReader(str(candidate.path))
        recordings = compare_recordings(readers, selection.steps, limit=_NUM_ROWS, on_step=on_key)
        return judge_recordings(recordings), recordings
    if baseline.kind == "metrics":
        logs = load_metrics(baseline.path), load_metrics(candidate.path)
        metrics = compare_metrics(*logs, bounds=bounds, selection=selection)
        return decide(metrics, None, bounds=bounds, required=(), selection=selection), None
    if baseline.run is None or candidate.run is None:
        tensors = compare_trace_folders(
            baseline.path, candidate.path, bounds=bounds, selection=selection, on_key=on_key
        )
        return decide(None, tensors, bounds=bounds, required=(), selection=selection), None
    is_deterministic = all(item.stored is not None and item.stored.is_deterministic for item in opened)
    verdict = judge_runs(
        baseline.run,
        candidate.run,
        bounds=bounds,
        is_deterministic=is_deterministic,
        selection=selection,
        has_metrics=has_metrics,
        on_key=on_key,
    )
    return verdict, None
