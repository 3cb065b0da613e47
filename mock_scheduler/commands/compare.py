"""Gives the verdicts of ``mock-scheduler compare`` and ``replicas``: on two inputs on disk, or the copies of one run.

Contract: reads runs (``config.yaml``, ``run.json``, ``ledger.json``, ``metrics.jsonl``, ``trace/``), traces, metrics or
recordings; starts nothing and writes only the files asked for. Two runs must have trained on the same rollouts: each
states the digest of every batch. ``replicas`` reads a trace of whole tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.adapters.ray.tasks import spread_over_ray
from mock_scheduler.comparison.pairing.selection import EVERYTHING, Selection
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import build_console, show_progress
from mock_scheduler.report.comparison.page import write_comparison_page
from mock_scheduler.report.comparison.text import print_comparison, print_replicas
from mock_scheduler.report.json_file import comparison_to_json, replicas_to_json, save_comparison, save_replicas
from mock_scheduler.run_folder.inputs import check_page_path
from mock_scheduler.support.documents import STDOUT, write_json
from mock_scheduler.support.spread import Spread
from mock_scheduler.support.text import format_bytes
from mock_scheduler.verdict.compare_runs import compare_paths
from mock_scheduler.verdict.replicas import check_replicas_at


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """Holds options of a comparison.

    Attributes:
        selection: steps, kinds and names.
        tolerance: bounds ``name=value`` over the candidate's own.
        noise: a file of the baseline's measured noise, or perturbed runs.
        has_metrics: whether metrics of runs are compared.
        json_path, html_path: reports to write; ``-``: JSON on stdout, in place of the text.
        over_ray: the steps of traces are compared by tasks of a Ray cluster.
    """

    selection: Selection = EVERYTHING
    tolerance: tuple[str, ...] = ()
    noise: tuple[str | Path, ...] = ()
    has_metrics: bool = True
    json_path: str | None = None
    html_path: Path | None = None
    over_ray: bool = False


def run_compare(
    baseline: str | Path, candidate: str | Path, options: CompareOptions, *, console: Console | None = None
) -> int:
    """Compare two runs, traces, metrics or recordings, print the report, and return the verdict's exit code.

    ``console``: ``None`` is this terminal.

    Raises:
        ConfigError: a side cannot be compared, the sides are of different kinds, a bound or the noise is none, the page
            no file, or none of the chosen steps is present.
        AlignmentError: a run is not completed, or has no trace.
        TraceError, RecordingError: a file cannot be read.
    """
    check_page_path(options.html_path)
    size_bytes = sum(map(_size_bytes, (baseline, candidate)))
    # Of a bucket nobody has asked yet.
    sizes = format_bytes(size_bytes) if size_bytes else "both sides"
    with _spreading(options.over_ray) as spread, show_progress(f"comparing {sizes}") as on_key:
        result = compare_paths(
            baseline,
            candidate,
            selection=options.selection,
            tolerance=options.tolerance,
            noise=options.noise,
            has_metrics=options.has_metrics,
            on_key=on_key,
            spread=spread,
        )
    files = {}
    if options.html_path is not None:
        write_comparison_page(result, options.html_path)
        files["html"] = options.html_path
    if options.json_path == STDOUT:
        write_json(comparison_to_json(result), STDOUT)
        return int(result.exit_code)
    if options.json_path is not None:
        files["json"] = Path(options.json_path)
        save_comparison(result, files["json"])
    print_comparison(result, console or build_console(), files=files)
    return int(result.exit_code)


def _spreading(over_ray: bool) -> AbstractContextManager[Spread | None]:
    return spread_over_ray() if over_ray else nullcontext()


def _size_bytes(location: str | Path) -> int:
    """Add up the sizes of all files on this machine that are to be read."""
    path = Path(location)
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def run_replicas(
    location: str | Path,
    selection: Selection,
    *,
    json_path: str | None = None,
    console: Console | None = None,
    verify: bool = False,
    over_ray: bool = False,
) -> int:
    """Check all copies within one run or trace: 0 equal, 1 different, 3 nothing is held twice, or a choice is empty.

    ``verify``: first read all of the trace, whatever is selected, and check every SHA-256. ``over_ray``: tasks of a Ray
    cluster read the tensors. Raises ``ConfigError`` where
    there is no trace of whole tensors, ``TraceError`` where a file cannot be read or was changed.
    """
    with _spreading(over_ray) as spread, show_progress("checking copies") as on_key:
        result = check_replicas_at(location, selection=selection, verify=verify, on_key=on_key, spread=spread)
    if json_path == STDOUT:
        write_json(replicas_to_json(result), STDOUT)
        return int(result.exit_code)
    files = {}
    if json_path is not None:
        files["json"] = Path(json_path)
        save_replicas(result, files["json"])
    print_replicas(result, console or build_console(), files=files)
    return int(result.exit_code)
