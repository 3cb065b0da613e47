"""Every tensor of two traces, step by step: read from both sides at once, paired by canonical key, and judged.

Memory is bounded by the largest name of a step: ``step_walk`` says how. When all is judged, the first tensors beyond
their bound and the largest differences are read once more, to say where they differ and what that looks like.
"""

from __future__ import annotations

from collections.abc import Callable

from mock_scheduler.compare.bounds.bounds import Bounds
from mock_scheduler.compare.explain.explanation import explain_differences, layout_numbers
from mock_scheduler.compare.explain.noisy_places import PlaceNoise
from mock_scheduler.compare.pairing.ledgers import compare_ledgers
from mock_scheduler.compare.pairing.pairs import TracePair
from mock_scheduler.compare.pairing.selection import EVERYTHING, Selection
from mock_scheduler.compare.pairing.tokens import TokenAlignment
from mock_scheduler.compare.tensors import TensorComparison
from mock_scheduler.compare.walk.found import Found, find_missing_steps, in_order
from mock_scheduler.compare.walk.step_walk import StepWalk
from mock_scheduler.support.threads import without_inner_threads
from mock_scheduler.trace.full.reader import TraceReader

#: Called with how many tensors are done, of how many.
OnKey = Callable[[int, int], None]


def compare_traces(
    baseline: TraceReader,
    candidate: TraceReader,
    *,
    bounds: Bounds,
    selection: Selection = EVERYTHING,
    on_key: OnKey | None = None,
) -> TensorComparison:
    """Compare every selected tensor of every step; what is on one side only, or cannot be subtracted, is a finding.

    Raises ``TraceError`` where a file of either side is damaged or does not hold what it says.
    """
    steps = tuple(step for step in sorted(set(baseline.steps) & set(candidate.steps)) if selection.has_step(step))
    found = Found(findings=find_missing_steps(baseline.steps, candidate.steps, selection))
    keys = {step: (baseline.keys(step), candidate.keys(step)) for step in steps}
    total, done = sum(len(mine | other) for mine, other in keys.values()), 0
    alignments: dict[int, TokenAlignment] = {}
    with TracePair(baseline, candidate) as traces, PlaceNoise(bounds.noise) as places, without_inner_threads():
        for step in steps:
            walk = StepWalk(
                traces,
                keys[step],
                step=step,
                bounds=bounds,
                selection=selection,
                places=places,
                is_first=step == steps[0],
                found=found,
            )
            alignments[step] = walk.tokens
            for num_keys in walk.run():
                done += num_keys
                if on_key is not None:
                    on_key(done, total)
            found.ledgers += compare_ledgers(traces.readers, step, selection, found.notes)
        if bounds.noise is not None:
            gradients = (item.key for item in found.differences if item.key.kind == "gradient")
            found.numbers = next((layout_numbers(traces.readers, key) for key in gradients), {})
        found.differences = explain_differences(in_order(found.differences), traces, alignments, found.conflicts[1])
    return found.result(steps)
