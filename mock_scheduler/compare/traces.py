"""Two trace folders of any level, compared at the finest level that both have."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from mock_scheduler.compare.selection import EVERYTHING, Selection
from mock_scheduler.compare.sketch_sources import FullAsSketches, SketchSource
from mock_scheduler.compare.sketches import compare_sketches
from mock_scheduler.compare.tensors import TensorComparison
from mock_scheduler.compare.walk import OnKey, compare_traces
from mock_scheduler.config.schema import ToleranceConfig
from mock_scheduler.errors import TraceError
from mock_scheduler.trace.reader import open_trace
from mock_scheduler.trace.sketch_files import has_full, has_sketches
from mock_scheduler.trace.sketch_reader import SketchReader, open_sketches


def trace_level(trace_dir: Path) -> Literal["full", "sketch"]:
    """The level of a trace; raises ``TraceError`` where there is none."""
    if has_full(trace_dir):
        return "full"
    if has_sketches(trace_dir):
        return "sketch"
    raise TraceError(f"{trace_dir}: no trace here; run with trace.level=full or trace.level=sketch")


def compare_trace_folders(
    baseline_dir: Path,
    candidate_dir: Path,
    *,
    tolerance: ToleranceConfig,
    selection: Selection = EVERYTHING,
    on_key: OnKey | None = None,
) -> TensorComparison:
    """Compare two traces: whole tensors where both have them, else sketches. Raises ``TraceError``."""
    levels = trace_level(baseline_dir), trace_level(candidate_dir)
    if levels == ("full", "full"):
        with open_trace(baseline_dir) as baseline, open_trace(candidate_dir) as candidate:
            return compare_traces(baseline, candidate, tolerance=tolerance, selection=selection, on_key=on_key)
    folders = (baseline_dir, candidate_dir)
    opened = [open_sketches(path) if level == "sketch" else None for path, level in zip(folders, levels, strict=True)]
    num_buckets = next(_count_buckets(reader) for reader in opened if reader is not None)
    with ExitStack() as stack:
        sides: list[SketchSource] = [
            FullAsSketches(stack.enter_context(open_trace(path)), num_buckets=num_buckets) if reader is None else reader
            for path, reader in zip(folders, opened, strict=True)
        ]
        return compare_sketches(sides[0], sides[1], tolerance=tolerance, selection=selection, on_key=on_key)


def _count_buckets(reader: SketchReader) -> int:
    """Of the sketches of a trace, which are all alike; 1 where it has none."""
    for step in reader.steps:
        for key in sorted(reader.keys(step), key=str):
            return reader.sketch(key).sketch.num_buckets
    return 1
