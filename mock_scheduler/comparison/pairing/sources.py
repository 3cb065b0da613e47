"""Opens traces as a comparison reads them, and traces of whole tensors as sketches."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from mock_scheduler.trace.entries import RankPlace, StepFooter, TraceKey
from mock_scheduler.trace.full.reader import TraceReader
from mock_scheduler.trace.rows import open_gaps, spread_tokens
from mock_scheduler.trace.sketch.reader import MergedSketch
from mock_scheduler.trace.sketch.sketch import NUM_BUCKETS, sketch_of


class LedgerSource(Protocol):
    """Reads a trace with ledgers."""

    def footers(self, step: int) -> tuple[tuple[RankPlace, StepFooter], ...]:
        """Returns the footer of each rank of a step, by global rank."""


class StepSource(LedgerSource, Protocol):
    """Reads a trace of any level."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Returns the traced steps, ascending."""

    def is_complete(self, step: int) -> bool:
        """Whether all ranks wrote it."""

    def keys(self, step: int) -> frozenset[TraceKey]:
        """Returns every tensor of a step."""

    def is_by_content(self, step: int) -> bool:
        """Whether rows are by content: nobody told the training its rows."""


class SketchSource(StepSource, Protocol):
    """Reads a trace with sketches."""

    def sketch(self, key: TraceKey, *, may_lack_tokens: bool = False) -> MergedSketch:
        """Returns the sketch of a whole tensor; ``may_lack_tokens``: as of ``TraceReader.merge``."""


class FullAsSketches:
    """Reads a trace of whole tensors as sketches of ``num_buckets``."""

    def __init__(self, reader: TraceReader, *, num_buckets: int = NUM_BUCKETS) -> None:
        self._reader = reader
        self._num_buckets = num_buckets
        self.merge = reader.merge
        self.is_complete = reader.is_complete
        self.keys = reader.keys
        self.is_by_content = reader.is_by_content

    @property
    def steps(self) -> tuple[int, ...]:
        """Returns the traced steps, ascending."""
        return self._reader.steps

    def footers(self, step: int) -> tuple[tuple[RankPlace, StepFooter], ...]:
        """Returns the footer of each rank of a step; rows by content are at the places that sketches have them at."""
        footers = self._reader.footers(step)
        if not self._reader.is_by_content(step):
            return footers
        # A rank that sketches knows no other rank's rows, so their places follow from their content and leave gaps.
        return tuple((place, replace(footer, rows=open_gaps(footer.rows))) for place, footer in footers)

    def sketch(self, key: TraceKey, *, may_lack_tokens: bool = False) -> MergedSketch:
        """Returns the sketch of the merged tensor; the merge finds unequal copies."""
        merged = self._reader.merge(key, may_lack_tokens=may_lack_tokens)
        spec = None
        if merged.dims[:1] == ("token",) and self._reader.is_by_content(key.step):
            # A sketch weighs each element by its place: only at the same places are two of the same tokens equal.
            spec = spread_tokens(key.name, tuple(merged.tensor.shape), self._reader.footer(key.step).rows)
        return MergedSketch(
            sketch=sketch_of(merged.tensor, merged.present, num_buckets=self._num_buckets, spec=spec),
            dtype=merged.tensor.dtype,
            global_shape=tuple(merged.tensor.shape),
            conflicts=(),
            dims=merged.dims,
            is_masked=self._reader.is_masked(key),
            missing=merged.missing,
        )
