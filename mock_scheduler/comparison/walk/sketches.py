"""Compares two traces, one of them of sketches: equal bits by fingerprint, else estimated relative differences.

The bounds are those of whole tensors (``measure.distance``). A tensor is beyond its bound where its whole error bar is,
within it where the whole error bar is, and undecided between. Where bits are not equal, a sketch leaves some questions
undecided: which experts were chosen differently, with all tensors stored in their order, and an update with unequal
gradients, since elements with gradients of rounding cannot be left out. Weights of a model in less than float32 are not
compared, and neither are token tensors of batches in another order. From a full trace, the sketch of each whole tensor
is made, one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from mock_scheduler.comparison.bounds.bounds import Bounds
from mock_scheduler.comparison.findings import (
    SIDES,
    CopiesDiffer,
    Fact,
    LacksParameter,
    LacksTokens,
    NonFinite,
    NotFinite,
    OtherCount,
    OtherDtype,
    OtherInput,
    OtherRecomputation,
    OtherShape,
    OtherStart,
    SketchTokensNotCompared,
    SketchWeightsNotCompared,
    finding,
)
from mock_scheduler.comparison.measure.distance import relate
from mock_scheduler.comparison.pairing.selection import EVERYTHING, Selection
from mock_scheduler.comparison.pairing.sources import SketchSource
from mock_scheduler.comparison.tensors import TensorComparison, TensorDifference
from mock_scheduler.comparison.thresholds import POOL_ROUNDING_UNITS, SMALLEST_DIFFERENCE
from mock_scheduler.comparison.walk.steps import Found, OnKey, RoundingPools, StepSides, walk_steps
from mock_scheduler.support.tensor_bytes import dtype_name
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.names import is_by_slot, is_choice, routed_part
from mock_scheduler.trace.sketch.reader import MergedSketch
from mock_scheduler.trace.sketch.sketch import Estimate, Sketch, difference

_SketchPair = tuple[MergedSketch, MergedSketch]


def compare_sketches(
    baseline: SketchSource,
    candidate: SketchSource,
    *,
    bounds: Bounds,
    selection: Selection = EVERYTHING,
    on_key: OnKey | None = None,
) -> TensorComparison:
    """Compares every selected tensor of every step, as ``traces.compare_traces`` does.

    Raises:
        TraceError: A file of either side is damaged.
    """
    sources, found = (baseline, candidate), Found()

    def open_step(sides: StepSides) -> _SketchStep:
        return _SketchStep(sources, sides, bounds=bounds)

    steps = walk_steps(sources, selection, found, open_step, on_key)
    return found.result(steps, level="sketch")


class _SketchStep:
    """Compares the sketches of one step, in execution order."""

    def __init__(self, sources: tuple[SketchSource, SketchSource], sides: StepSides, *, bounds: Bounds) -> None:
        self._sources = sources
        self._sides = sides
        self._bounds = bounds
        self._found = sides.found
        self._has_same_rows = sides.footers[0].rows == sides.footers[1].rows
        self._parameters: dict[str, _SketchPair] = {}
        self._has_equal_gradients: dict[tuple[int, str], bool] = {}
        self._other_choices: set[tuple[int, str]] = set()
        self._pools = RoundingPools()
        if not self._has_same_rows:
            self._found.notes[SketchTokensNotCompared(step=sides.step)] = None

    def run(self) -> Iterator[int]:
        """Compares everything; yields 1 after each tensor."""
        for key in self._sides.all_keys:
            self._compare(key)
            yield 1
        self._add_rounding()

    def _compare(self, key: TraceKey) -> None:
        """Judges the next tensor, or remembers it to judge others by."""
        if key.kind == "recomputed":
            if self._sides.is_recomputed(key):
                self._found.findings.append(finding(key, OtherRecomputation()))
            return
        is_selected = self._sides.is_selected(key)
        # An update is a change of sketches, so the parameter before it is read even where only the update is wanted.
        is_helper = key.kind in ("initial", "gradient") and self._sides.selection.has_name(key.name)
        if key.kind == "weight" and is_selected:
            self._found.notes[SketchWeightsNotCompared()] = None
        if key.kind == "weight" or not (is_selected or is_helper or self._sides.is_data(key)):
            return
        pair = self._read(key, is_reported=is_selected)
        if pair is None:
            return
        identical = _is_identical(pair)
        if self._sides.is_data(key) and not identical:
            self._found.findings.append(finding(key, OtherInput()))
        if key.kind == "gradient":
            self._has_equal_gradients[key.update, key.name] = identical
        if is_choice(key) and not identical:
            self._other_choices.add((key.update, routed_part(key.name)))
        if key.kind in ("initial", "parameter"):
            self._compare_state(key, pair, is_selected=is_selected)
        elif is_selected:
            estimate = difference(pair[0].sketch, pair[1].sketch)
            self._add(key, pair, estimate, is_undecided=self._depends_on_choice(key, pair))

    def _add_rounding(self) -> None:
        """Gives each difference of the step the rounding of its pool, which all its tensors together show."""
        for item in self._pools.unrounded:
            known = self._found.differences[item.position]
            rounding = item.bound.absolute
            if item.bound.has_rounding:
                unit = max(item.unit, item.bound.unit)
                rounding += (
                    POOL_ROUNDING_UNITS * unit * math.sqrt(self._pools.mean_square(item.pool) * known.num_elements)
                )
            relative, bound = relate(item.distance, item.size, rounding=rounding, tolerance=item.bound.relative)
            # Of a tensor that is 0, a difference within its rounding is none at all.
            is_nothing = item.size == 0.0 and relative == 0.0
            self._found.differences[item.position] = replace(
                known,
                tolerance=bound,
                relative=relative,
                low=0.0 if is_nothing else known.low,
                high=0.0 if is_nothing else known.high,
                is_zero=item.size == 0.0,
            )

    def _read(self, key: TraceKey, *, is_reported: bool) -> _SketchPair | None:
        if not self._sides.has_both(key, is_reported=is_reported):
            return None
        ours, theirs = self._sources[0].sketch(key), self._sources[1].sketch(key, may_lack_tokens=True)
        for side, merged in zip(SIDES, (ours, theirs), strict=True):
            conflicts = (CopiesDiffer(side=side, conflict=conflict) for conflict in merged.conflicts)
            self._found.findings += [finding(key, fact) for fact in conflicts]
        if theirs.missing:
            if is_reported:
                self._found.findings.append(finding(key, LacksTokens(missing=theirs.missing)))
            return None
        # A sketch mixes all tokens, so one of other tokens cannot be brought into another order.
        if ours.dims[:1] == ("token",) and not self._has_same_rows:
            return None
        facts = _find_faults(ours, theirs)
        if is_reported:
            self._found.findings += [finding(key, fact) for fact in facts]
        # Equally broken on both sides, or a fault would say so: neither is a reference.
        broken = _count_broken(ours.sketch)
        if broken is not None and not facts:
            self._found.unusable.append(finding(key, NotFinite(baseline=broken, candidate=broken)))
        return None if facts or broken is not None else (ours, theirs)

    def _depends_on_choice(self, key: TraceKey, pair: _SketchPair) -> bool:
        is_concerned = is_choice(key) or is_by_slot(pair[0].dims)
        return is_concerned and (key.update, routed_part(key.name)) in self._other_choices

    def _compare_state(self, key: TraceKey, pair: _SketchPair, *, is_selected: bool) -> None:
        before = self._parameters.get(key.name)
        self._parameters[key.name] = pair
        if not is_selected:
            return
        if key.kind == "initial":
            if self._sides.is_first:
                self._compare_initial(key, pair)
        elif before is None:
            self._found.findings.append(finding(key, LacksParameter(needed_by="update")))
        else:
            self._compare_update(key, before, pair)

    def _compare_initial(self, key: TraceKey, pair: _SketchPair) -> None:
        if key.step > 0:
            self._add(key, pair, difference(pair[0].sketch, pair[1].sketch))
        # At step 0 both runs have drawn the same weights, so nothing has rounded yet.
        elif not _is_identical(pair):
            self._found.findings.append(finding(key, OtherStart()))
        else:
            self._found.num_exact += bool(pair[0].sketch.num_elements)

    def _compare_update(self, key: TraceKey, before: _SketchPair, after: _SketchPair) -> None:
        changes = [_subtract(new.sketch, old.sketch) for old, new in zip(before, after, strict=True)]
        identical = _is_identical(before) and _is_identical(after)
        estimate = difference(changes[0], changes[1])
        norm = changes[0].norm
        limit = self._bounds.tensor(key)
        rounding = limit.absolute
        if limit.has_rounding and after[0].dtype.is_floating_point:
            # Storing rounds each element by up to half the spacing of its own size, whose norm is about this.
            rounding += torch.finfo(after[0].dtype).eps * after[0].sketch.norm
        distance = 0.0 if identical else estimate.norm_difference
        relative, bound = relate(distance, norm, rounding=rounding, tolerance=limit.relative)
        has_equal_gradient = self._has_equal_gradients.get((key.update, key.name), False)
        self._found.differences.append(
            TensorDifference(
                key=key,
                num_elements=after[0].sketch.num_elements,
                bit_equal=identical,
                max_abs=0.0,
                relative=relative,
                tolerance=bound,
                distance=distance,
                size=norm,
                is_estimate=limit.is_estimate,
                is_zero=before[0].sketch.is_identical(after[0].sketch),
                # Elements with gradients of rounding may make up all of the difference.
                low=0.0 if identical or not has_equal_gradient else estimate.low,
                high=0.0 if identical else estimate.high,
            )
        )

    def _add(self, key: TraceKey, pair: _SketchPair, estimate: Estimate, *, is_undecided: bool = False) -> None:
        identical = _is_identical(pair)
        is_number = pair[0].dtype.is_floating_point
        low, high, relative = estimate.low, estimate.high, estimate.relative
        # The whole range: how far the choices moved it cannot be told.
        if not identical and is_undecided:
            low, high = 0.0, math.inf
        elif not identical and not is_number:
            # Integers do not round: any difference is one, however small its estimate.
            low = relative = high = max(relative, SMALLEST_DIFFERENCE)
        bound = self._bounds.tensor(key)
        norm, num_elements = pair[0].sketch.norm, pair[0].sketch.num_elements
        if is_number:
            self._pools.add(
                key,
                position=len(self._found.differences),
                bound=bound,
                unit=torch.finfo(pair[0].dtype).eps,
                distance=estimate.norm_difference,
                size=norm,
                count=num_elements,
            )
        self._found.differences.append(
            TensorDifference(
                key=key,
                num_elements=num_elements,
                bit_equal=identical,
                max_abs=0.0,
                relative=relative,
                tolerance=bound.relative if is_number else 0.0,
                distance=0.0 if identical else estimate.norm_difference,
                size=norm,
                is_estimate=bound.is_estimate and is_number,
                low=low,
                high=high,
            )
        )


def _is_identical(pair: _SketchPair) -> bool:
    return pair[0].dtype == pair[1].dtype and pair[0].sketch.is_identical(pair[1].sketch)


def _find_faults(ours: MergedSketch, theirs: MergedSketch) -> list[Fact]:
    """Finds the reasons two sketches cannot be compared."""
    faults: list[Fact] = []
    if ours.dtype != theirs.dtype:
        faults.append(OtherDtype(baseline=dtype_name(ours.dtype), candidate=dtype_name(theirs.dtype)))
    if ours.global_shape != theirs.global_shape:
        faults.append(OtherShape(baseline=tuple(ours.global_shape), candidate=tuple(theirs.global_shape)))
    # Of other shapes, counts of elements differ for this reason alone.
    if faults:
        return faults
    mine, other = ours.sketch.num_elements, theirs.sketch.num_elements
    if mine != other:
        faults.append(OtherCount(baseline=mine, candidate=other))
    broken = (_count_broken(ours.sketch), _count_broken(theirs.sketch))
    if broken[0] != broken[1]:
        faults.append(NotFinite(baseline=broken[0], candidate=broken[1]))
    return faults


def _count_broken(sketch: Sketch) -> NonFinite | None:
    if not sketch.num_nan and not sketch.num_infinite:
        return None
    return NonFinite(num_nan=sketch.num_nan, num_infinite=sketch.num_infinite, num_elements=sketch.num_elements)


def _subtract(after: Sketch, before: Sketch) -> Sketch:
    """Makes the sketch of a change; sketches are linear. Its norm is an estimate: only each side's is known."""
    sums = after.sums - before.sums
    return replace(
        after,
        sums=sums,
        sum_of_squares=float(sums.square().sum()),
        # Fingerprints are sums modulo 2^64, so the change's is their difference.
        fingerprint=(after.fingerprint - before.fingerprint) % (1 << 64),
    )
