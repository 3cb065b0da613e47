"""``mock-scheduler compare`` and ``replicas``: verdicts on what lies on disk, however it came there.

Contract: reads runs (``config.yaml``, ``run.json``, ``ledger.json``, ``metrics.jsonl``, ``trace/``), traces, metrics or
recordings; starts nothing and writes only the files that were asked for. Two runs must have trained on the same
rollouts, which each states by the digest of every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from mock_scheduler.compare.bounds.bounds import Bounds
from mock_scheduler.compare.pairing.selection import EVERYTHING, Selection
from mock_scheduler.compare.walk.metrics import compare_metrics, load_metrics
from mock_scheduler.compare.walk.steps import OnKey
from mock_scheduler.compare.walk.traces import compare_trace_folders, trace_level
from mock_scheduler.display.console import build_console
from mock_scheduler.display.progress_bar import show_progress
from mock_scheduler.errors import ConfigError
from mock_scheduler.recording.inspection.comparison import RecordingDifferences, compare_recordings
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.report.comparison.page import write_comparison_page
from mock_scheduler.report.comparison.text import print_comparison, print_replicas
from mock_scheduler.report.json_file import comparison_to_json, replicas_to_json, save_comparison, save_replicas
from mock_scheduler.run_folder.inputs import (
    ComparedInput,
    OpenedInput,
    check_page_path,
    check_steps,
    find_trace,
    open_inputs,
)
from mock_scheduler.support.files import encode_json
from mock_scheduler.support.text import format_bytes
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.verdict.comparison_bounds import resolve_bounds
from mock_scheduler.verdict.recordings import judge_recordings
from mock_scheduler.verdict.replicas import check_replicas
from mock_scheduler.verdict.results import ComparisonResult
from mock_scheduler.verdict.runs import judge_runs
from mock_scheduler.verdict.verdict import Verdict, decide

_STDOUT = "-"
_NUM_ROWS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """How two sides are compared.

    selection: steps, kinds and names. tolerance: bounds ``name=value`` over the candidate's own. noise: a file of the
    baseline's measured noise, or perturbed runs. has_metrics: whether metrics of runs are compared. json_path,
    html_path: reports to write; ``-``: JSON on stdout, in place of the text.
    """

    selection: Selection = EVERYTHING
    tolerance: tuple[str, ...] = ()
    noise: tuple[Path, ...] = ()
    has_metrics: bool = True
    json_path: str | None = None
    html_path: Path | None = None


def run_compare(baseline: Path, candidate: Path, options: CompareOptions, *, console: Console | None = None) -> int:
    """Compare two runs, traces, metrics or recordings, print the report, and return the verdict's exit code.

    Raises ``ConfigError`` where a side is nothing that can be compared, both are of different kinds, a bound or
    the noise is none, the page no file, or none of the chosen steps there, ``AlignmentError`` where a run is not
    completed or has no trace, ``TraceError`` or ``RecordingError`` where a file cannot be read. ``console``: ``None``
    is this terminal.
    """
    check_page_path(options.html_path)
    opened = open_inputs((baseline, candidate))
    check_steps([item.side for item in opened], options.selection.steps)
    bounds = resolve_bounds(opened, options.tolerance, options.noise)
    sizes = format_bytes(sum(map(_size_bytes, (baseline, candidate))))
    with show_progress(f"comparing {sizes}") as on_key:
        alignment, recordings = _judge(opened, options, bounds=bounds, on_key=on_key)
    result = ComparisonResult(
        baseline=opened[0].side,
        candidate=opened[1].side,
        bounds=bounds,
        alignment=alignment,
        recordings=recordings,
    )
    files = {}
    if options.html_path is not None:
        write_comparison_page(result, options.html_path)
        files["html"] = options.html_path
    if options.json_path == _STDOUT:
        print(encode_json(comparison_to_json(result), sort_keys=False).decode(), end="")
        return int(result.exit_code)
    if options.json_path is not None:
        files["json"] = Path(options.json_path)
        save_comparison(result, files["json"])
    print_comparison(result, console or build_console(), files=files)
    return int(result.exit_code)


def run_replicas(
    path: Path,
    selection: Selection,
    *,
    json_path: str | None = None,
    console: Console | None = None,
    verify: bool = False,
) -> int:
    """Check all copies within one run or trace; 0 equal, 1 different, 3 where nothing is held twice.

    ``verify``: first read all of the trace, whatever is selected, and check every SHA-256. Raises ``ConfigError`` where
    there is no trace of whole tensors, ``TraceError`` where a file cannot be read or is not what was written.
    """
    trace_dir = find_trace(path)
    if trace_level(trace_dir) != "full":
        raise ConfigError(
            f"{trace_dir} has sketches only, whose copies are checked by compare; trace the run with trace.level=full"
        )
    check_steps([ComparedInput(name=str(path), path=trace_dir, kind="trace", level="full", run=None)], selection.steps)
    with open_trace(trace_dir) as reader, show_progress("checking copies") as on_key:
        if verify:
            reader.verify()
        result = check_replicas(reader, path, selection=selection, on_key=on_key)
    if json_path == _STDOUT:
        print(encode_json(replicas_to_json(result), sort_keys=False).decode(), end="")
        return int(result.exit_code)
    files = {}
    if json_path is not None:
        files["json"] = Path(json_path)
        save_replicas(result, files["json"])
    print_replicas(result, console or build_console(), files=files)
    return int(result.exit_code)


def _judge(
    opened: tuple[OpenedInput, OpenedInput], options: CompareOptions, *, bounds: Bounds, on_key: OnKey
) -> tuple[Verdict, RecordingDifferences | None]:
    baseline, candidate = (item.side for item in opened)
    selection = options.selection
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
    alignment = judge_runs(
        baseline.run,
        candidate.run,
        bounds=bounds,
        is_deterministic=is_deterministic,
        selection=selection,
        has_metrics=options.has_metrics,
        on_key=on_key,
    )
    return alignment, None


def _size_bytes(path: Path) -> int:
    """Of all files there, which is what is read."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())
