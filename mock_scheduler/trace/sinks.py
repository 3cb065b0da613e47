"""Opens the sink for a rank's entries of one step, as the configuration says."""

from __future__ import annotations

from pathlib import Path

from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.trace.entries import RankPlace, TraceSink
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.sketch.files import SketchSink


def open_sink(config: TraceConfig, trace_dir: Path, *, step: int, place: RankPlace, world_size: int) -> TraceSink:
    """Whole tensors for level ``full``, sketches for level ``sketch``.

    Raises ``TraceError`` where this rank's step is traced already, and ``ValueError`` for level ``off``, since
    nothing is to be collected.
    """
    if config.level == "full":
        return FullSink(trace_dir, step=step, place=place, world_size=world_size, part_bytes=config.part_bytes)
    if config.level == "sketch":
        return SketchSink(trace_dir, step=step, place=place, world_size=world_size, num_buckets=config.sketch_buckets)
    raise ValueError("trace.level is off: nothing is traced, so there is nothing to write to")
