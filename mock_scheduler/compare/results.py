"""What an alignment run found, as plain data for reports; and the comparison of two finished runs by their folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.compare.metrics import compare_metrics, load_metrics
from mock_scheduler.compare.tensors import compare_traces
from mock_scheduler.compare.verdict import Alignment, decide
from mock_scheduler.config.schema import ToleranceConfig
from mock_scheduler.run_files import METRICS_FILE, TRACE_FOLDER
from mock_scheduler.trace.reader import open_trace


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One finished run. Seconds as the run measured them (``wall_s``, ``rollout_s``) and from the outside
    (``elapsed_s``: with the start of its processes); ``built`` counts what it built, such as
    engines. ``batches``: the digest of the rollouts that it trained on, by step.
    """

    name: str
    output_dir: Path
    layout: str
    wall_s: float
    rollout_s: float
    elapsed_s: float
    built: Mapping[str, int]
    batches: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateResult:
    """One candidate: what it overrides, its planned layout, its run (``None`` where it failed) and the verdict.

    ``log_path``: its terminal output; ``None`` where that was not kept.
    """

    name: str
    overrides: tuple[str, ...]
    layout: str
    log_path: Path | None
    run: RunSummary | None
    alignment: Alignment


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignmentResult:
    """A whole alignment run. ``recording_dir``: ``None`` where no recording is known, or it is no longer there."""

    config_name: str
    output_dir: Path
    recording_dir: Path | None
    tolerance: ToleranceConfig
    baseline: RunSummary
    candidates: tuple[CandidateResult, ...]


def compare_runs(baseline_dir: Path, candidate_dir: Path, *, tolerance: ToleranceConfig) -> Alignment:
    """The verdict on two finished runs, out of their ``metrics.jsonl`` and ``trace/``.

    Raises ``AlignmentError`` or ``TraceError`` where these cannot be read.
    """
    metrics = compare_metrics(
        load_metrics(baseline_dir / METRICS_FILE),
        load_metrics(candidate_dir / METRICS_FILE),
        tolerance=tolerance,
    )
    with open_trace(baseline_dir / TRACE_FOLDER) as baseline, open_trace(candidate_dir / TRACE_FOLDER) as candidate:
        tensors = compare_traces(baseline, candidate, tolerance=tolerance)
    return decide(metrics, tensors, tolerance=tolerance)
