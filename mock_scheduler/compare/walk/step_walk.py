"""One step of two traces.

One name is walked at a time: in memory are six tensors of it (of an update the gradient, and the parameter before and
after, of both sides) and chunks of what their comparison computes. Choices of experts come first: what is stored in
their order is compared without the tokens that rounding sent elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from mock_scheduler.compare.bounds.bounds import Bounds, TensorBound
from mock_scheduler.compare.differences import Locality
from mock_scheduler.compare.explain.expert_bias import find_moved_experts, find_without_gradient
from mock_scheduler.compare.explain.explanation import NUM_FIRST, boundaries_of, dims_of
from mock_scheduler.compare.explain.initial import describe_initial
from mock_scheduler.compare.explain.locality import find_localities
from mock_scheduler.compare.explain.noisy_places import PlaceNoise
from mock_scheduler.compare.findings import Finding
from mock_scheduler.compare.measure.distance import (
    measure,
    rounding_unit,
    with_rounding,
)
from mock_scheduler.compare.pairing.order import order_keys
from mock_scheduler.compare.pairing.pairs import (
    TensorPair,
    TracePair,
    describe_broken,
    describe_dtypes,
    describe_other_presence,
    finding,
    lacks_tokens,
    locate,
    pair_up,
)
from mock_scheduler.compare.pairing.routing import find_flips, is_by_slot, is_choice, logits_key, routed_part
from mock_scheduler.compare.pairing.selection import Absence, Selection, explain_absence
from mock_scheduler.compare.pairing.tokens import align_tokens, find_row_differences
from mock_scheduler.compare.tensors import LARGEST_BOUND, SLOPE_KINDS, TensorDifference
from mock_scheduler.compare.walk.found import SIDES, Found
from mock_scheduler.compare.walk.state import STATE_KINDS, StateWalk, needed_kinds
from mock_scheduler.trace.entries import TraceKey

_PoolKey = tuple[str, int, str]


class StepWalk:
    """Compares the tensors of one step; ``tokens``: how the tokens of the two correspond."""

    def __init__(
        self,
        traces: TracePair,
        keys: tuple[frozenset[TraceKey], frozenset[TraceKey]],
        *,
        step: int,
        bounds: Bounds,
        selection: Selection,
        places: PlaceNoise,
        is_first: bool,
        found: Found,
    ) -> None:
        self._traces = traces
        self._keys = keys
        self._bounds = bounds
        self._selection = selection
        self._places = places
        self._is_first = is_first
        self._found = found
        self._footers = (traces.readers[0].footer(step), traces.readers[1].footer(step))
        self._is_partial = tuple(not reader.is_complete(step) for reader in traces.readers)
        self.tokens = align_tokens(self._footers[0].rows, self._footers[1].rows)
        self._flipped: dict[tuple[int, str], torch.Tensor] = {}
        self._moved: dict[int, torch.Tensor] = {}
        self._moved_experts: dict[tuple[int, str], frozenset[int]] = {}
        self._without_gradient = find_without_gradient(keys[0]) & find_without_gradient(keys[1])
        self._num_initial = 0
        self._squares: dict[_PoolKey, tuple[float, int]] = {}
        self._unrounded: list[tuple[int, TensorBound, float, _PoolKey]] = []
        found.findings += find_row_differences(step, *self._footers)
        found.absences += self._unobserved_by_both(step)

    def run(self) -> Iterator[int]:
        """Compare everything; gives after each name how many tensors that were."""
        for group in self._groups():
            if group[0].kind in STATE_KINDS:
                self._walk_state(group)
            else:
                for key in group:
                    self._walk(key)
            yield len(group)
        self._add_rounding()

    def pair(self, key: TraceKey, *, is_reported: bool = True) -> TensorPair | None:
        """A tensor of both sides that can be subtracted; ``None``, with a finding, where there is no such."""
        present = [key in keys for keys in self._keys]
        if not all(present):
            if is_reported:
                self._found.absences.append(self._explain(key, present.index(False)))
            return None
        merged = self._traces.merge(key)
        for conflicts, side in zip(self._found.conflicts, merged, strict=True):
            conflicts.extend(side.conflicts)
        paired = pair_up(key, merged, self.tokens)
        if isinstance(paired, Finding):
            self._found.findings.append(paired)
            return None
        problems = [describe_dtypes(paired)]
        presence = describe_other_presence(paired)
        if merged[1].missing:
            if is_reported:
                self._found.findings.append(lacks_tokens(key, merged[1].missing))
        elif any(self._is_partial) and presence:
            self._found.notes[f"{key.describe()} {presence}, as some ranks wrote no trace"] = None
        else:
            problems.append(presence)
        self._found.findings += [finding(key, problem) for problem in problems if problem and is_reported]
        return paired if self._is_finite(paired) else None

    def add(self, difference: TensorDifference, pair: TensorPair) -> None:
        """Keep a difference, with the place of its worst element."""
        self._found.differences.append(locate(difference, pair, self._traces, self.tokens))

    def measure(self, pair: TensorPair, *, num_flipped_tokens: int = 0) -> None:
        """Keep the difference of any tensor but a parameter; its rounding is added at the end of the step."""
        key = pair.key
        bound = self._bounds.tensor(key)
        difference = measure(key, pair.baseline, pair.candidate, bound=bound, present=pair.present, sums=pair.sums)
        unit = rounding_unit(pair.baseline)
        if unit:
            norm = pair.sums.norm
            pool = (key.kind, key.update, key.name.rpartition(".")[2] if key.kind == "optimizer" else "")
            total, count = self._squares.get(pool, (0.0, 0))
            self._squares[pool] = (total + norm * norm, count + difference.num_elements)
            self._unrounded.append((len(self._found.differences), bound, unit, pool))
        localities = self._find_places(pair, bound) if not difference.bit_equal else ()
        self.add(replace(difference, num_flipped_tokens=num_flipped_tokens, localities=localities), pair)

    def describe_initial(self, pair: TensorPair) -> str:
        """As ``state.Measures`` has it, of the first few."""
        self._num_initial += 1
        return describe_initial(pair, self._traces) if self._num_initial <= NUM_FIRST else ""

    def find_moved_experts(self, pair: TensorPair) -> Collection[int] | None:
        """As ``state.Measures`` has it."""
        key = pair.key
        return self._moved_experts.get((key.update, routed_part(key.name))) if pair.dims == ("expert",) else None

    def _find_places(self, pair: TensorPair, bound: TensorBound) -> tuple[Locality, ...]:
        """Places that differ by more than their own noise, of a tensor that does not; empty where it is not known."""
        key = pair.key
        if not self._places.is_known or key.kind not in SLOPE_KINDS or bound.relative > LARGEST_BOUND:
            return ()
        dims = dims_of(pair)
        if pair.baseline.dtype != pair.candidate.dtype or not pair.sums.figures.relative <= bound.relative or not dims:
            return ()
        moved = self._moved.get(key.update)
        if moved is not None:  # what other experts compute differs at its full size, for other tokens in every run
            if dims[0] != "token" or len(moved) != len(pair.baseline):
                return ()
            pair = pair.without_tokens(moved)
        self._found.num_located += 1
        boundaries = boundaries_of(key, self._traces.readers, is_same_order=self.tokens.index is None)
        found = find_localities(pair.baseline, pair.candidate, dims=dims, present=pair.present, boundaries=boundaries)
        return self._places.confirm(found, pair, dims, self._traces.readers[0])

    def _groups(self) -> list[list[TraceKey]]:
        """Tensors that are walked together: the state of one name; choices of experts before what depends on them."""
        selection, needed = self._selection, needed_kinds(self._selection)
        state: dict[str, list[TraceKey]] = {}
        others: list[TraceKey] = []
        for key in order_keys(self._keys[0] | self._keys[1]):
            if key.kind in STATE_KINDS:
                if key.kind in needed and selection.has_name(key.name):
                    state.setdefault(key.name, []).append(key)
            elif is_choice(key) or self._is_selected(key):
                others.append(key)
        others.sort(key=lambda key: not is_choice(key))
        in_time = [sorted(keys, key=lambda key: (key.update, STATE_KINDS.index(key.kind))) for keys in state.values()]
        return [[key] for key in others] + in_time

    def _is_selected(self, key: TraceKey) -> bool:
        return self._selection.has_kind(key.kind) and self._selection.has_name(key.name)

    def _walk(self, key: TraceKey) -> None:
        is_reported = self._is_selected(key)
        pair = self.pair(key, is_reported=is_reported)
        if pair is None:
            return
        if is_choice(key):
            self._find_flips(pair)
            if pair.baseline.dim() == 2:
                moved_experts = find_moved_experts(pair.baseline, pair.candidate)
                self._moved_experts[key.update, routed_part(key.name)] = moved_experts
            if not pair.is_equal and pair.baseline.dim() == 2:
                moved = (pair.baseline != pair.candidate).any(1)
                self._moved[key.update] = self._moved.get(key.update, False) | moved
        place = (key.update, routed_part(key.name))
        num_flipped = 0
        if (is_choice(key) or is_by_slot(pair.dims)) and place in self._flipped:
            num_flipped = int(self._flipped[place].sum())
            pair = pair.without_tokens(self._flipped[place])
        if is_reported:
            self.measure(pair, num_flipped_tokens=num_flipped)

    def _find_flips(self, choice: TensorPair) -> None:
        key = logits_key(choice.key)
        logits = self.pair(key, is_reported=False) if all(key in keys for keys in self._keys) else None
        if logits is None or choice.baseline.dim() != 2 or len(logits.baseline) != len(choice.baseline):
            return
        summary, is_flipped = find_flips(choice, logits)
        if summary.num_flipped:
            self._found.flips.append(summary)
            self._flipped[choice.key.update, routed_part(choice.key.name)] = is_flipped

    def _walk_state(self, keys: list[TraceKey]) -> None:
        has_gradient = keys[0].name not in self._without_gradient
        walk = StateWalk(self, bounds=self._bounds, is_first=self._is_first, has_gradient=has_gradient)
        for key in keys:
            is_reported = self._selection.has_kind(key.kind)
            pair = self.pair(key, is_reported=is_reported)
            if pair is not None:
                problem = walk.compare(pair, is_reported=is_reported)
                if problem and is_reported:
                    self._found.findings.append(finding(key, problem))

    def _is_finite(self, pair: TensorPair) -> bool:
        """Whether both sides are; else says what is wrong, as a fault of one side or of both runs."""
        mine, other = describe_broken(pair)
        if bool(mine) != bool(other):
            side = "baseline" if mine else "candidate"
            self._found.findings.append(finding(pair.key, f"has {mine or other} in the {side}"))
        elif mine:
            self._found.unusable.append(finding(pair.key, f"has {mine} in both runs"))
        return not mine and not other

    def _explain(self, key: TraceKey, side: int) -> Absence:
        return explain_absence(key, SIDES[side], self._footers[side], is_partial=self._is_partial[side])

    def _unobserved_by_both(self, step: int) -> list[Absence]:
        """What both runs were asked for, and neither shows."""
        absences = []
        named = {(key.kind, key.name) for keys in self._keys for key in keys}
        for side, footer in zip(SIDES, self._footers, strict=True):
            for item in footer.unobserved:
                key = TraceKey(step=step, update=0, kind=item.kind, name=item.name)
                if (item.kind, item.name) not in named and self._is_selected(key):
                    absences.append(Absence(key=key, side=side, reason=item.reason, is_fault=False))
        return absences

    def _add_rounding(self) -> None:
        """Give each difference of the step the bound that its rounding leaves it, which all tensors together show."""
        differences = self._found.differences
        for position, bound, unit, pool in self._unrounded:
            total, count = self._squares[pool]
            usual = math.sqrt(total / max(count, 1))
            differences[position] = with_rounding(differences[position], bound, usual=usual, unit=unit)
