"""Every tensor of two traces, step by step: read from both sides at once, paired by canonical key, and judged.

Memory is bounded by the largest name of a step (``full_step``). When all is judged, the first tensors beyond their
bound and the largest differences are read once more, to say where they differ and what that looks like.
"""

from __future__ import annotations

from mock_scheduler.compare.bounds.bounds import Bounds
from mock_scheduler.compare.explain.explanation import explain_differences, layout_numbers
from mock_scheduler.compare.explain.noisy_places import PlaceNoise
from mock_scheduler.compare.pairing.pairs import TracePair
from mock_scheduler.compare.pairing.selection import EVERYTHING, Selection
from mock_scheduler.compare.pairing.tokens import TokenAlignment
from mock_scheduler.compare.tensors import TensorComparison
from mock_scheduler.compare.walk.full_step import FullStep
from mock_scheduler.compare.walk.steps import Found, OnKey, StepSides, walk_steps
from mock_scheduler.support.threads import without_inner_threads
from mock_scheduler.trace.full.reader import TraceReader


def compare_traces(
    baseline: TraceReader,
    candidate: TraceReader,
    *,
    bounds: Bounds,
    selection: Selection = EVERYTHING,
    on_key: OnKey | None = None,
) -> TensorComparison:
    """Compares every selected tensor of every step; tensors of one side only, or of other shapes, are findings.

    Raises:
        TraceError: A file of either side is damaged.
    """
    found = Found()
    alignments: dict[int, TokenAlignment] = {}
    with TracePair(baseline, candidate) as traces, PlaceNoise(bounds.noise) as places, without_inner_threads():

        def open_step(sides: StepSides) -> FullStep:
            step = FullStep(traces, sides, bounds=bounds, places=places)
            alignments[sides.step] = step.tokens
            return step

        steps = walk_steps(traces.readers, selection, found, open_step, on_key)
        if bounds.noise is not None:
            gradients = (item.key for item in found.differences if item.key.kind == "gradient")
            found.numbers = next((layout_numbers(traces.readers, key) for key in gradients), {})
        found.differences = explain_differences(found.differences, traces, alignments, found.conflicts[1])
    return found.result(steps)
