"""Compares one step of two traces of whole tensors.

One name is walked at a time: in memory are chunks of its comparison, and six tensors of it where they cannot be read as
they lie in the files (of an update the gradient, and the parameter before and after, of both sides). Choices of
experts come first: tensors stored in their order are compared without the tokens rounding sent elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from mock_scheduler.comparison.bounds.bound import TensorBound
from mock_scheduler.comparison.bounds.bounds import Bounds
from mock_scheduler.comparison.explain.expert_bias import find_moved_experts, find_without_gradient
from mock_scheduler.comparison.explain.explanation import boundaries_of, dims_of, explain_initial
from mock_scheduler.comparison.explain.locality import find_localities
from mock_scheduler.comparison.explain.noisy_places import PlaceNoise
from mock_scheduler.comparison.findings import (
    Finding,
    LacksTokens,
    OtherDtype,
    OtherInput,
    OtherPlaces,
    OtherStart,
    PartlyWritten,
    finding,
)
from mock_scheduler.comparison.measure.distance import measure, rounding_unit, with_rounding
from mock_scheduler.comparison.pairing.pairs import (
    TensorPair,
    TracePair,
    find_not_finite,
    find_other_dtype,
    find_other_places,
    locate,
    pair_up,
)
from mock_scheduler.comparison.pairing.precision import Narrow, explains_dtypes, find_narrow
from mock_scheduler.comparison.pairing.routing import find_flips
from mock_scheduler.comparison.pairing.tokens import align_tokens
from mock_scheduler.comparison.residuals import Locality
from mock_scheduler.comparison.tensors import SLOPE_KINDS, TensorDifference
from mock_scheduler.comparison.thresholds import LARGEST_BOUND, NUM_FIRST
from mock_scheduler.comparison.walk.narrowed import NarrowedValues
from mock_scheduler.comparison.walk.norms import GradientSquare
from mock_scheduler.comparison.walk.recomputation import find_other_recomputation
from mock_scheduler.comparison.walk.state import STATE_KINDS, StateRules, compare_state, needed_kinds
from mock_scheduler.comparison.walk.steps import RoundingPools, StepSides
from mock_scheduler.support.tensor_bytes import view_as_bits
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.names import is_by_slot, is_choice, logits_key, routed_part


class FullStep:
    """Compares the tensors of one step; ``tokens``: how the tokens of the two correspond."""

    def __init__(self, traces: TracePair, sides: StepSides, *, bounds: Bounds, places: PlaceNoise) -> None:
        self._traces = traces
        self._sides = sides
        self._bounds = bounds
        self._places = places
        self._found = sides.found
        self.tokens = align_tokens(sides.footers[0].rows, sides.footers[1].rows)
        self._flipped: dict[tuple[int, str], torch.Tensor] = {}
        self._moved: dict[int, torch.Tensor] = {}
        self._moved_experts: dict[tuple[int, str], frozenset[int]] = {}
        # In both runs: a gradient that one run lacks is a finding, and its parameter no decision.
        self._without_gradient = find_without_gradient(sides.keys[0]) & find_without_gradient(sides.keys[1])
        self._num_initial = 0
        # Sums of the first step only: what follows has the same reason, and the search takes 0.1 s an update.
        self._narrowed = NarrowedValues(has_sums=sides.is_first)
        self._pools = RoundingPools()
        self._found.absences += sides.find_unobserved()

    def run(self) -> Iterator[int]:
        """Compares everything; yields after each name how many tensors it had."""
        for group in self._groups():
            if group[0].kind in STATE_KINDS:
                self._walk_state(group)
            else:
                for key in group:
                    self._walk(key)
            yield len(group)
        self._add_rounding()
        self._found.findings += self._narrowed.findings()
        note = self._narrowed.note()
        if note is not None:
            self._found.notes[note] = None

    def _groups(self) -> list[list[TraceKey]]:
        """Groups tensors that are walked together: the state of one name; choices of experts before all else."""
        sides, needed = self._sides, needed_kinds(self._sides.selection)
        state: dict[str, list[TraceKey]] = {}
        others: list[TraceKey] = []
        for key in sides.all_keys:
            if key.kind == "recomputed":
                if self._sides.is_recomputed(key):
                    self._found.findings.append(find_other_recomputation(key, self._traces.readers[1]))
            elif key.kind in STATE_KINDS:
                if key.kind in needed and sides.selection.has_name(key.name):
                    state.setdefault(key.name, []).append(key)
            elif is_choice(key) or sides.is_selected(key) or sides.is_data(key):
                others.append(key)
        # A stable sort: choices first, all else still in the order of computation.
        others.sort(key=lambda key: not is_choice(key))
        in_time = [sorted(keys, key=lambda key: (key.update, STATE_KINDS.index(key.kind))) for keys in state.values()]
        return [[key] for key in others] + in_time

    def _walk(self, key: TraceKey) -> None:
        is_reported = self._sides.is_selected(key)
        pair = self._pair(key, is_reported=is_reported)
        if pair is None:
            return
        if self._sides.is_data(key) and not pair.is_equal:
            self._found.findings.append(finding(key, self._find_other_input(pair)))
        # Before it is judged, since its own flips are left out of it too.
        if is_choice(key):
            self._follow_choice(pair)
        place = (key.update, routed_part(key.name))
        num_flipped = 0
        if (is_choice(key) or is_by_slot(pair.dims)) and place in self._flipped:
            num_flipped = int(self._flipped[place].sum())
            pair = pair.without_tokens(self._flipped[place])
        # Helpers are read for what follows from them, and judged nowhere.
        if is_reported:
            self._measure(pair, num_flipped_tokens=num_flipped)

    def _find_other_input(self, pair: TensorPair) -> OtherInput:
        """Finds the first token, in the order of rows, whose input is another in the candidate."""
        if pair.dims[:1] != ("token",):
            return OtherInput()
        # As float64, so that inputs of two dtypes are compared by value; token ids and masks are exact in it.
        differs = view_as_bits(pair.baseline.double()) != view_as_bits(pair.candidate.double())
        if pair.present is not None:
            differs = differs & pair.present
        by_token = differs.reshape(len(differs), -1)
        token = int(by_token.any(dim=1).nonzero()[0])
        element = int(by_token[token].nonzero()[0])
        row, position = self.tokens.find(token)
        values = (side.reshape(len(differs), -1)[token, element].item() for side in (pair.baseline, pair.candidate))
        mine, other = values
        return OtherInput(
            row=row, position=position, baseline=mine, candidate=other, num_tokens=int(by_token.any(dim=1).sum())
        )

    def _walk_state(self, keys: Sequence[TraceKey]) -> None:
        selection = self._sides.selection
        rules = StateRules(
            bounds=self._bounds,
            reported=frozenset(kind for kind in STATE_KINDS if selection.has_kind(kind)),
            is_first=self._sides.is_first,
            has_gradient=keys[0].name not in self._without_gradient,
            moved_experts=self._moved_experts,
            narrow=self._find_narrow(keys),
        )
        pairs = (self._pair(key, is_reported=selection.has_kind(key.kind)) for key in keys)
        read = self._narrowed.watch(pair for pair in pairs if pair is not None)
        for pair, outcome in compare_state(read, rules):
            if outcome == "exact":
                self._found.num_exact += bool(pair.sums.figures.num_elements)
            elif isinstance(outcome, TensorDifference):
                self._add(outcome, pair)
            elif isinstance(outcome, str):
                self._measure(pair)
            else:
                is_unexplained = isinstance(outcome, OtherStart) and outcome.rounded is None
                fact = self._explain_start(pair) if is_unexplained else outcome
                self._found.findings.append(finding(pair.key, fact))

    def _find_narrow(self, keys: Sequence[TraceKey]) -> Narrow | None:
        """Finds the side that computes with narrower weights of a name than the other."""
        weights = [key for key in keys if key.kind == "weight"]
        dtypes = [
            next((reader.dtype_and_shape(key)[0] for key in weights if key in present), None)
            for reader, present in zip(self._traces.readers, self._sides.keys, strict=True)
        ]
        return find_narrow(dtypes, self._sides.selection.precisions)

    def _pair(self, key: TraceKey, *, is_reported: bool = True) -> TensorPair | None:
        """Reads a tensor of both sides for subtraction; ``None``, with a finding, where there is none."""
        if not self._sides.has_both(key, is_reported=is_reported):
            return None
        merged = self._traces.merge(key)
        for conflicts, side in zip(self._found.conflicts, merged, strict=True):
            conflicts.extend(side.conflicts)
        paired = pair_up(key, merged, self.tokens)
        if isinstance(paired, Finding):
            self._found.findings.append(paired)
            return None
        if paired.is_doubtful:
            self._traces.check_digests(key)
        dtypes = paired.dtypes
        is_explained = explains_dtypes(key.kind, dtypes, self._sides.selection.precisions)
        facts: list[OtherDtype | OtherPlaces | None] = [] if is_explained else [find_other_dtype(paired)]
        places = find_other_places(paired)
        if merged[1].missing:
            # Tokens that no rank holds are elements of one side alone too, which need not be said twice.
            if is_reported:
                self._found.findings.append(finding(key, LacksTokens(missing=merged[1].missing)))
        elif any(self._sides.is_partial) and places is not None:
            self._found.notes[PartlyWritten(key=key, places=places)] = None
        else:
            facts.append(places)
        self._found.findings += [finding(key, fact) for fact in facts if fact is not None and is_reported]
        return paired if self._is_finite(paired) else None

    def _is_finite(self, pair: TensorPair) -> bool:
        """Whether both sides are; else keeps the fault, of one side or of both runs."""
        broken = find_not_finite(pair)
        if broken is None:
            return True
        # A baseline that is broken itself is no reference, and no fault of the candidate's.
        is_both = broken.baseline is not None and broken.candidate is not None
        (self._found.unusable if is_both else self._found.findings).append(finding(pair.key, broken))
        return False

    def _follow_choice(self, choice: TensorPair) -> None:
        """Keeps the tokens with other experts, and the experts with other tokens."""
        key = choice.key
        place = (key.update, routed_part(key.name))
        self._find_flips(choice)
        if choice.values[0].dim() == 2:
            self._moved_experts[place] = find_moved_experts(choice.baseline, choice.candidate)
            if not choice.is_equal:
                moved = (choice.baseline != choice.candidate).any(1)
                self._moved[key.update] = self._moved.get(key.update, False) | moved

    def _find_flips(self, choice: TensorPair) -> None:
        key = logits_key(choice.key)
        logits = self._pair(key, is_reported=False) if all(key in keys for keys in self._sides.keys) else None
        if logits is None or choice.values[0].dim() != 2 or len(logits.baseline) != len(choice.baseline):
            return
        summary, is_flipped = find_flips(choice, logits)
        # Whole tokens are left out: of a token with another expert, no element means the same in both runs.
        if summary.num_flipped:
            self._found.flips.append(summary)
            self._flipped[choice.key.update, routed_part(choice.key.name)] = is_flipped

    def _measure(self, pair: TensorPair, *, num_flipped_tokens: int = 0) -> None:
        """Keeps the difference of any tensor but a parameter; its rounding is added at the end of the step."""
        key = pair.key
        bound = self._bounds.tensor(key)
        difference = measure(key, *pair.values, bound=bound, present=pair.present, sums=pair.sums)
        # Of a tensor that a side has in part, no square is known.
        if key.kind == "gradient" and pair.present is None:
            square = GradientSquare(key=key, baseline=pair.sums.norm**2, candidate=pair.sums.other_norm**2)
            self._found.squares.append(square)
        unit = max(map(rounding_unit, pair.dtypes))
        if unit:
            self._pools.add(
                key,
                position=len(self._found.differences),
                bound=bound,
                unit=unit,
                distance=difference.distance,
                size=pair.sums.norm,
                count=difference.num_elements,
            )
        if key.kind == "optimizer":
            self._narrowed.add(pair)
        localities = self._find_places(pair, bound) if not difference.bit_equal else ()
        self._add(replace(difference, num_flipped_tokens=num_flipped_tokens, localities=localities), pair)

    def _add(self, difference: TensorDifference, pair: TensorPair) -> None:
        self._found.differences.append(locate(difference, pair, self._traces, self.tokens))

    def _explain_start(self, pair: TensorPair) -> OtherStart:
        """Explains the first few initial parameters that differ; each may read many tensors."""
        self._num_initial += 1
        return explain_initial(pair, self._traces) if self._num_initial <= NUM_FIRST else OtherStart()

    def _find_places(self, pair: TensorPair, bound: TensorBound) -> tuple[Locality, ...]:
        """Finds places differing by more than their own noise in a tensor within its bound; none where not known."""
        key = pair.key
        # Places have noise of their own only where it was measured; beyond its bound a tensor is a divergence anyway.
        if not self._places.is_known or key.kind not in SLOPE_KINDS or bound.relative > LARGEST_BOUND:
            return ()
        dims = dims_of(pair)
        if pair.dtypes[0] != pair.dtypes[1] or not pair.sums.figures.relative <= bound.relative or not dims:
            return ()
        moved = self._moved.get(key.update)
        if moved is not None:
            # What other experts compute differs at its full size, for other tokens in every run.
            if dims[0] != "token" or len(moved) != pair.values[0].shape[0]:
                return ()
            pair = pair.without_tokens(moved)
        self._found.num_located += 1
        boundaries = boundaries_of(key, self._traces.readers, is_same_order=self.tokens.is_same_order)
        found = find_localities(pair.baseline, pair.candidate, dims=dims, present=pair.present, boundaries=boundaries)
        return self._places.confirm(found, pair, dims, self._traces.readers[0])

    def _add_rounding(self) -> None:
        """Gives each difference of the step the rounding of its pool, which all its tensors together show."""
        differences = self._found.differences
        for item in self._pools.unrounded:
            # Rounding follows the numbers that were added, not what was left of them: a tensor that cancelled is as
            # coarse.
            usual = math.sqrt(self._pools.mean_square(item.pool))
            known = differences[item.position]
            differences[item.position] = with_rounding(known, item.bound, usual=usual, unit=item.unit)
