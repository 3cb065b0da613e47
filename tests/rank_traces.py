"""Traces that tests write: everything one rank traces of a step, at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mock_scheduler.trace.entries import RankPlace, StepFooter, TraceEntry
from mock_scheduler.trace.full.files import part_path
from mock_scheduler.trace.full.pieces import RankStep
from mock_scheduler.trace.full.writing import FullSink


def save_rank_trace(
    trace_dir: Path,
    *,
    step: int,
    global_rank: int,
    world_size: int,
    coordinates: Mapping[str, int],
    entries: Sequence[TraceEntry],
    footer: StepFooter | None = None,
) -> Path:
    """Write one part, the rank's whole step, and return its file; raises as ``FullSink``, and leaves nothing then."""
    place = RankPlace(global_rank=global_rank, coordinates=coordinates)
    sink = FullSink(trace_dir, step=step, place=place, world_size=world_size)
    try:
        for entry in entries:
            sink.add(entry)
    except BaseException:
        sink.abandon()
        raise
    sink.close(footer or StepFooter())
    return part_path(trace_dir, RankStep(step=step, place=place, world_size=world_size), 0)
