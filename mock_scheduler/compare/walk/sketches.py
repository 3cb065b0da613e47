"""Two traces of which at least one has sketches only: equal bits by fingerprint, else estimated relative differences.

The bounds are those of whole tensors (``judging``). A tensor is beyond its bound where its whole error bar is, within
it where the whole error bar is, and undecided between. Some things a sketch cannot say, and are undecided where the
bits are not equal: which experts were chosen differently and what is stored in their order, and an update whose
gradients are not equal, since elements whose gradients are rounding cannot be left out. What a model in less than
float32 computes with is not compared, and neither are token tensors of batches that are not in the same order.
Of a full trace, the sketch of each whole tensor is made, one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from mock_scheduler.compare.bounds.bounds import Bounds, TensorBound
from mock_scheduler.compare.measure.distance import ROUNDING_UNITS, relate
from mock_scheduler.compare.pairing.ledgers import compare_ledgers
from mock_scheduler.compare.pairing.order import order_keys
from mock_scheduler.compare.pairing.pairs import finding, lacks_tokens
from mock_scheduler.compare.pairing.routing import is_by_slot, is_choice, routed_part
from mock_scheduler.compare.pairing.selection import EVERYTHING, Absence, Selection, explain_absence
from mock_scheduler.compare.pairing.sketch_sources import SketchSource
from mock_scheduler.compare.pairing.tokens import find_row_differences
from mock_scheduler.compare.tensors import TensorComparison, TensorDifference
from mock_scheduler.compare.walk.found import SIDES, Found, find_missing_steps, in_order
from mock_scheduler.support.tensor_bytes import dtype_name
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.sketch.reader import MergedSketch
from mock_scheduler.trace.sketch.sketch import Estimate, Sketch, difference

_SketchPair = tuple[MergedSketch, MergedSketch]


def compare_sketches(
    baseline: SketchSource,
    candidate: SketchSource,
    *,
    bounds: Bounds,
    selection: Selection = EVERYTHING,
    on_key: Callable[[int, int], None] | None = None,
) -> TensorComparison:
    """Compare every selected tensor of every step; symmetric, as ``walk.compare_traces`` is. Raises ``TraceError``."""
    sides = (baseline, candidate)
    steps = tuple(step for step in sorted(set(baseline.steps) & set(candidate.steps)) if selection.has_step(step))
    found = Found(findings=find_missing_steps(baseline.steps, candidate.steps, selection))
    total, done = sum(len(baseline.keys(step) | candidate.keys(step)) for step in steps), 0
    for step in steps:
        walk = _SketchStep(sides, step, bounds=bounds, selection=selection, found=found, is_first=step == steps[0])
        for key in order_keys(baseline.keys(step) | candidate.keys(step)):
            walk.compare(key)
            done += 1
            if on_key is not None:
                on_key(done, total)
        walk.add_rounding()
        found.ledgers += compare_ledgers(sides, step, selection, found.notes)
    found.differences = in_order(found.differences)
    return found.result(steps, level="sketch")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """A difference without the rounding of its kind. norm: ||a||; pool: of which tensors its rounding is taken."""

    position: int
    norm: float
    distance: float
    unit: float
    bound: TensorBound
    pool: tuple[str, int, str]


class _SketchStep:
    """Compares the sketches of one step, in execution order."""

    def __init__(
        self,
        sides: tuple[SketchSource, SketchSource],
        step: int,
        *,
        bounds: Bounds,
        selection: Selection,
        found: Found,
        is_first: bool,
    ) -> None:
        self._sides = sides
        self._bounds = bounds
        self._selection = selection
        self._found = found
        self._is_first = is_first
        self._footers = tuple(side.footers(step)[0][1] for side in sides)
        self._has_same_rows = self._footers[0].rows == self._footers[1].rows
        self._keys = tuple(side.keys(step) for side in sides)
        self._parameters: dict[str, _SketchPair] = {}
        self._has_equal_gradients: dict[tuple[int, str], bool] = {}
        self._other_choices: set[tuple[int, str]] = set()
        self._squares: dict[tuple[str, int, str], tuple[float, int]] = {}
        self._measured: list[_Measured] = []
        found.findings += find_row_differences(step, self._footers[0], self._footers[1])
        if not self._has_same_rows:
            found.notes[f"step {step}: sketches of tokens were not compared, as the rows are not in the same order"] = (
                None
            )

    def compare(self, key: TraceKey) -> None:
        """Judge the next tensor, or remember it to judge others by."""
        is_selected = self._selection.has_kind(key.kind) and self._selection.has_name(key.name)
        is_helper = key.kind in ("initial", "gradient") and self._selection.has_name(key.name)
        if key.kind == "weight" and is_selected:
            self._found.notes["weights are not compared at level sketch: their rounding is judged bit by bit"] = None
        if key.kind == "weight" or not (is_selected or is_helper):
            return
        pair = self._read(key, is_reported=is_selected)
        if pair is None:
            return
        identical = _is_identical(pair)
        if key.kind == "gradient":
            self._has_equal_gradients[key.update, key.name] = identical
        if is_choice(key) and not identical:
            self._other_choices.add((key.update, routed_part(key.name)))
        if key.kind in ("initial", "parameter"):
            self._compare_state(key, pair, is_selected=is_selected)
        elif is_selected:
            self._add(
                key, pair, difference(pair[0].sketch, pair[1].sketch), is_undecided=self._depends_on_choice(key, pair)
            )

    def add_rounding(self) -> None:
        """Give each difference of the step the bound that its rounding leaves it, which all tensors together show."""
        for item in self._measured:
            total, count = self._squares[item.pool]
            known = self._found.differences[item.position]
            rounding = item.bound.absolute
            if item.bound.has_rounding:
                unit = max(item.unit, item.bound.unit)
                rounding += ROUNDING_UNITS * unit * math.sqrt(total / max(count, 1) * known.num_elements)
            relative, bound = relate(item.distance, item.norm, rounding=rounding, tolerance=item.bound.relative)
            is_nothing = item.norm == 0.0 and relative == 0.0
            self._found.differences[item.position] = replace(
                known,
                tolerance=bound,
                relative=relative,
                low=0.0 if is_nothing else known.low,
                high=0.0 if is_nothing else known.high,
                is_zero=item.norm == 0.0,
            )

    def _read(self, key: TraceKey, *, is_reported: bool) -> _SketchPair | None:
        present = [key in keys for keys in self._keys]
        if not all(present):
            if is_reported:
                self._found.absences.append(self._explain(key, present.index(False)))
            return None
        ours, theirs = self._sides[0].sketch(key), self._sides[1].sketch(key, may_lack_tokens=True)
        for name, side in zip(SIDES, (ours, theirs), strict=True):
            for conflict in side.conflicts:
                self._found.findings.append(
                    finding(key, f"has copies in the {name} that differ: {conflict.describe()}")
                )
        if theirs.missing:
            if is_reported:
                self._found.findings.append(lacks_tokens(key, theirs.missing))
            return None
        if ours.dims[:1] == ("token",) and not self._has_same_rows:
            return None
        problems = _find_problems(ours, theirs)
        if is_reported:
            self._found.findings += [finding(key, problem) for problem in problems]
        broken = _describe_broken(ours.sketch)
        if broken and not problems:
            self._found.unusable.append(finding(key, f"has {broken} in both runs"))
        return None if problems or broken else (ours, theirs)

    def _explain(self, key: TraceKey, side: int) -> Absence:
        is_partial = not self._sides[side].is_complete(key.step)
        return explain_absence(key, SIDES[side], self._footers[side], is_partial=is_partial)

    def _depends_on_choice(self, key: TraceKey, pair: _SketchPair) -> bool:
        is_concerned = is_choice(key) or is_by_slot(pair[0].dims)
        return is_concerned and (key.update, routed_part(key.name)) in self._other_choices

    def _compare_state(self, key: TraceKey, pair: _SketchPair, *, is_selected: bool) -> None:
        before = self._parameters.get(key.name)
        self._parameters[key.name] = pair
        if key.kind == "initial":
            if is_selected and self._is_first:
                self._compare_initial(key, pair)
        elif is_selected and before is None:
            problem = "was traced without the parameter before it, so its update cannot be judged"
            self._found.findings.append(finding(key, problem))
        elif is_selected and before is not None:
            self._compare_update(key, before, pair)

    def _compare_initial(self, key: TraceKey, pair: _SketchPair) -> None:
        if key.step > 0:
            self._add(key, pair, difference(pair[0].sketch, pair[1].sketch))
        elif not _is_identical(pair):
            problem = "differs: both runs must start from the same weights, to the last bit"
            self._found.findings.append(finding(key, problem))

    def _compare_update(self, key: TraceKey, before: _SketchPair, after: _SketchPair) -> None:
        changes = [_subtract(new.sketch, old.sketch) for old, new in zip(before, after, strict=True)]
        identical = _is_identical(before) and _is_identical(after)
        estimate = difference(changes[0], changes[1])
        norm = changes[0].norm
        limit = self._bounds.tensor(key)
        rounding = limit.absolute
        if limit.has_rounding and after[0].dtype.is_floating_point:
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
                low=0.0 if identical or not has_equal_gradient else estimate.low,
                high=0.0 if identical else estimate.high,
            )
        )

    def _add(self, key: TraceKey, pair: _SketchPair, estimate: Estimate, *, is_undecided: bool = False) -> None:
        identical = _is_identical(pair)
        is_number = pair[0].dtype.is_floating_point
        low, high, relative = estimate.low, estimate.high, estimate.relative
        if not identical and is_undecided:
            low, high = 0.0, math.inf
        elif not identical and not is_number:
            low = relative = high = max(relative, 2.0**-52)
        bound = self._bounds.tensor(key)
        norm, num_elements = pair[0].sketch.norm, pair[0].sketch.num_elements
        if is_number:
            pool = (key.kind, key.update, key.name.rpartition(".")[2] if key.kind == "optimizer" else "")
            total, count = self._squares.get(pool, (0.0, 0))
            self._squares[pool] = (total + norm * norm, count + num_elements)
            self._measured.append(
                _Measured(
                    position=len(self._found.differences),
                    norm=norm,
                    distance=estimate.norm_difference,
                    unit=torch.finfo(pair[0].dtype).eps,
                    bound=bound,
                    pool=pool,
                )
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


def _find_problems(ours: MergedSketch, theirs: MergedSketch) -> list[str]:
    """What makes two sketches impossible to compare."""
    rows: tuple[tuple[str, object, object], ...] = (
        ("dtype", dtype_name(ours.dtype), dtype_name(theirs.dtype)),
        ("shape", list(ours.global_shape), list(theirs.global_shape)),
    )
    problems = [
        f"has {what} {mine} in the baseline and {other} in the candidate" for what, mine, other in rows if mine != other
    ]
    if problems:
        return problems
    mine, other = ours.sketch.num_elements, theirs.sketch.num_elements
    if mine != other:
        problems.append(f"has {mine:,} elements in the baseline and {other:,} in the candidate")
    broken = (_describe_broken(ours.sketch), _describe_broken(theirs.sketch))
    if broken[0] != broken[1]:
        problems.append(f"has {broken[0] or 'no NaN'} in the baseline and {broken[1] or 'no NaN'} in the candidate")
    return problems


def _describe_broken(sketch: Sketch) -> str:
    counts: Mapping[str, int] = {"NaN": sketch.num_nan, "infinity": sketch.num_infinite}
    found = [f"{what} in {count} of {sketch.num_elements} elements" for what, count in counts.items() if count]
    return " and ".join(found)


def _subtract(after: Sketch, before: Sketch) -> Sketch:
    """The sketch of a change: sketches are linear. Its norm is an estimate, since only that of each side is known."""
    sums = after.sums - before.sums
    return replace(
        after,
        sums=sums,
        sum_of_squares=float(sums.square().sum()),
        fingerprint=(after.fingerprint - before.fingerprint) % (1 << 64),
    )
