"""Two traces of any level, compared at the finest level both have.

Whole tensors are read from both sides at once, paired by canonical key, and judged; memory is bounded by the largest
name of a step (``full_step``). When all is judged, the first tensors beyond their bound and the largest differences are
read once more, to say where they differ and what that looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from mock_scheduler.comparison.bounds.bounds import Bounds
from mock_scheduler.comparison.explain.explanation import explain_differences, layout_numbers
from mock_scheduler.comparison.explain.noisy_places import PlaceNoise
from mock_scheduler.comparison.findings import Finding
from mock_scheduler.comparison.pairing.pairs import TracePair
from mock_scheduler.comparison.pairing.precision import are_other
from mock_scheduler.comparison.pairing.selection import EVERYTHING, Selection
from mock_scheduler.comparison.pairing.sources import FullAsSketches, SketchSource
from mock_scheduler.comparison.pairing.tokens import TokenAlignment, align_tokens, find_row_differences
from mock_scheduler.comparison.tensors import TensorComparison
from mock_scheduler.comparison.walk.clipping import find_other_clips
from mock_scheduler.comparison.walk.full_step import FullStep
from mock_scheduler.comparison.walk.metrics import MetricLog
from mock_scheduler.comparison.walk.norms import find_other_norms
from mock_scheduler.comparison.walk.sketches import compare_sketches
from mock_scheduler.comparison.walk.steps import Found, OnKey, StepSides, walk_step, walk_steps
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.support.fetched_folders import find_location
from mock_scheduler.support.spread import Spread
from mock_scheduler.support.threads import without_inner_threads
from mock_scheduler.trace.full.reader import TraceReader, open_trace
from mock_scheduler.trace.remote import open_trace_location
from mock_scheduler.trace.sketch.files import has_full, has_sketches
from mock_scheduler.trace.sketch.reader import SketchReader, open_sketches
from mock_scheduler.trace.sketch.sketch import NUM_BUCKETS

_COMPUTED_IN: tuple[TraceKind, ...] = ("initial", "parameter", "activation", "weight")
_NARROWEST_FIRST = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def trace_level(trace_dir: Path) -> Literal["full", "sketch"]:
    """Returns the level of a trace.

    Raises:
        TraceError: There is none.
    """
    if has_full(trace_dir):
        return "full"
    if has_sketches(trace_dir):
        return "sketch"
    raise TraceError(f"{trace_dir}: no trace here; run with trace.level=full or trace.level=sketch")


def compare_trace_folders(
    baseline_dir: Path,
    candidate_dir: Path,
    *,
    bounds: Bounds,
    selection: Selection = EVERYTHING,
    logs: tuple[MetricLog, MetricLog] | None = None,
    on_key: OnKey | None = None,
    spread: Spread | None = None,
) -> TensorComparison:
    """Compares two traces: whole tensors where both have them, else sketches.

    ``logs``: metrics of both runs, of which the norms are held to the gradients. ``spread``: shares the steps out to
    processes that open both folders by these paths, or the URLs that they stand for; ``None``: this one compares them.

    Raises:
        ConfigError: Sketches are to be shared out.
        TraceError: A file is damaged.
    """
    levels = trace_level(baseline_dir), trace_level(candidate_dir)
    if levels == ("full", "full"):
        compare_apart = None
        if spread is not None:
            locations = find_location(baseline_dir.absolute()), find_location(candidate_dir.absolute())
            compare_apart = _SharedSteps(locations=locations, bounds=bounds, selection=selection, spread=spread)
        with open_trace(baseline_dir) as baseline, open_trace(candidate_dir) as candidate:
            return compare_traces(
                baseline,
                candidate,
                bounds=bounds,
                selection=selection,
                logs=logs,
                on_key=on_key,
                compare_apart=compare_apart,
            )
    if spread is not None:
        raise ConfigError("a comparison of sketches is not shared out: it reads a few bytes of each tensor")
    # Whole tensors can be sketched, and sketches can never be made whole.
    with open_sources(baseline_dir, candidate_dir) as (ours, theirs):
        return compare_sketches(ours, theirs, bounds=bounds, selection=selection, on_key=on_key)


def compare_traces(
    baseline: TraceReader,
    candidate: TraceReader,
    *,
    bounds: Bounds,
    selection: Selection = EVERYTHING,
    logs: tuple[MetricLog, MetricLog] | None = None,
    on_key: OnKey | None = None,
    compare_apart: Callable[[Sequence[int]], Iterator[Found]] | None = None,
) -> TensorComparison:
    """Compares every selected tensor of every step; tensors of one side only, or of other shapes, are findings.

    ``compare_apart``: as of ``walk_steps``.

    Raises:
        TraceError: A file of either side is damaged.
    """
    found = Found()
    alignments: dict[int, TokenAlignment] = {}
    with TracePair(baseline, candidate) as traces, PlaceNoise(bounds.noise) as places, without_inner_threads():

        def open_step(sides: StepSides) -> FullStep:
            return FullStep(traces, sides, bounds=bounds, places=places)

        steps = walk_steps(traces.readers, selection, found, open_step, on_key, compare_apart=compare_apart)
        for step in steps:
            rows = (reader.footers(step)[0][1].rows for reader in traces.readers)
            alignments[step] = align_tokens(*rows)
        # Numbers of the layouts serve the tests for scaled gradients, which need measured noise.
        if bounds.noise is not None:
            gradients = (item.key for item in found.differences if item.key.kind == "gradient")
            found.numbers = next((layout_numbers(traces.readers, key) for key in gradients), {})
        others = find_other_norms(found.squares, found.keys, traces.readers, logs)
        # Gradients are clipped by the norm that a run states, so that a wrong one tells of the clip too.
        found.findings += others or find_other_clips(found.squares, found.keys, traces.readers)
        found.differences = explain_differences(found.differences, traces, alignments, found.conflicts[1])
    return found.result(steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StepTask:
    """Compares one step, in whatever process; ``found``: only what the step adds."""

    locations: tuple[str, str]
    bounds: Bounds
    selection: Selection
    step: int
    is_first: bool
    has_two_precisions: bool

    def __call__(self) -> Found:
        found = Found(has_two_precisions=self.has_two_precisions)
        with ExitStack() as stack:
            # An update is held to the moments of the step before.
            steps = (self.step - 1, self.step)
            folders = [stack.enter_context(open_trace_location(one, steps=steps)) for one in self.locations]
            baseline, candidate = (stack.enter_context(open_trace(path, steps=steps)) for path in folders)
            traces = stack.enter_context(TracePair(baseline, candidate))
            places = stack.enter_context(PlaceNoise(self.bounds.noise))
            stack.enter_context(without_inner_threads())

            def open_step(sides: StepSides) -> FullStep:
                return FullStep(traces, sides, bounds=self.bounds, places=places)

            for _ in walk_step(traces.readers, self.step, self.selection, found, open_step, is_first=self.is_first):
                pass
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _SharedSteps:
    """Shares steps out to other processes."""

    locations: tuple[str, str]
    bounds: Bounds
    selection: Selection
    spread: Spread

    def __call__(self, steps: Sequence[int]) -> Iterator[Found]:
        return self.spread(
            [
                _StepTask(
                    locations=self.locations,
                    bounds=self.bounds,
                    selection=self.selection,
                    step=step,
                    is_first=step == steps[0],
                    has_two_precisions=are_other(self.selection.precisions),
                )
                for step in steps
            ]
        )


@contextmanager
def open_sources(baseline_dir: Path, candidate_dir: Path) -> Iterator[tuple[SketchSource, SketchSource]]:
    """Opens two traces of any level, both with sketches of one size.

    Raises:
        TraceError: A file is damaged.
    """
    folders = (baseline_dir, candidate_dir)
    readers = [open_sketches(path) if trace_level(path) == "sketch" else None for path in folders]
    # Whole tensors are sketched as finely as the other side is, or the two could not be subtracted.
    num_buckets = next((_count_buckets(reader) for reader in readers if reader is not None), NUM_BUCKETS)
    with ExitStack() as stack:
        ours, theirs = (
            FullAsSketches(stack.enter_context(open_trace(path)), num_buckets=num_buckets) if reader is None else reader
            for path, reader in zip(folders, readers, strict=True)
        )
        yield ours, theirs


def find_other_rows(baseline_dir: Path, candidate_dir: Path) -> tuple[bool, Finding | None]:
    """Compares the rows of two traces and no tensor.

    Returns:
        Whether rows of a shared step are by content, and the first difference of such rows.

    Raises:
        TraceError: A file is damaged.
    """
    is_by_content = False
    with open_sources(baseline_dir, candidate_dir) as (ours, theirs):
        for step in sorted(set(ours.steps) & set(theirs.steps)):
            if not ours.is_by_content(step) and not theirs.is_by_content(step):
                continue
            is_by_content = True
            may_lack = not ours.is_complete(step), not theirs.is_complete(step)
            footers = ours.footers(step)[0][1], theirs.footers(step)[0][1]
            found = find_row_differences(step, *footers, may_lack=may_lack)
            if found:
                return True, found[0]
    return is_by_content, None


def find_dtypes(trace_dir: Path, kinds: Collection[TraceKind]) -> frozenset[torch.dtype]:
    """Finds the dtypes of all tensors of some kinds in the first step.

    Raises:
        TraceError: There is no trace.
    """
    if trace_level(trace_dir) == "sketch":
        sketches = open_sketches(trace_dir)
        keys = [key for key in sketches.keys(sketches.steps[0]) if key.kind in kinds]
        return frozenset(sketches.sketch(key).dtype for key in keys)
    with open_trace(trace_dir) as reader:
        keys = [key for key in reader.keys(reader.steps[0]) if key.kind in kinds]
        return frozenset(reader.dtype_and_shape(key)[0] for key in keys)


def find_epsilon(trace_dir: Path) -> float:
    """Returns the spacing at 1 of the numbers a model computes in; float32's where its trace shows none."""
    dtypes = find_dtypes(trace_dir, _COMPUTED_IN)
    # The coarsest spacing sets the rounding of all that is computed from it.
    narrowest = next((dtype for dtype in _NARROWEST_FIRST if dtype in dtypes), torch.float32)
    return torch.finfo(narrowest).eps


def _count_buckets(reader: SketchReader) -> int:
    """Returns how many buckets the sketches of a trace have; 1 where it has none."""
    for step in reader.steps:
        # One tensor stands for all: a trace has sketches of one size.
        for key in sorted(reader.keys(step), key=str):
            return reader.sketch(key).sketch.num_buckets
    return 1
