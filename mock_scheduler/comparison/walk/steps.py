"""How two traces are walked, step by step, whatever their level; and the results of a walk so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from mock_scheduler.comparison.bounds.bound import TensorBound
from mock_scheduler.comparison.findings import (
    SIDES,
    AbsentSteps,
    Finding,
    InputsNotCompared,
    Note,
    NotShown,
    OnlyIn,
    Unmatched,
    other_side,
)
from mock_scheduler.comparison.pairing.ledgers import compare_ledgers
from mock_scheduler.comparison.pairing.order import order_keys
from mock_scheduler.comparison.pairing.precision import are_other
from mock_scheduler.comparison.pairing.selection import (
    Absence,
    Selection,
    explain_absence,
    find_empty_kinds,
    find_faults,
    find_unmatched,
    list_not_compared,
    split_missing_steps,
)
from mock_scheduler.comparison.pairing.sources import StepSource
from mock_scheduler.comparison.pairing.tokens import find_row_differences
from mock_scheduler.comparison.tensors import ExpertFlips, LedgerComparison, TensorComparison, TensorDifference
from mock_scheduler.comparison.walk.norms import GradientSquare
from mock_scheduler.trace.entries import StepFooter, TraceKey
from mock_scheduler.trace.full.reader import ReplicaConflict

OnKey = Callable[[int, int], None]
"""Called with how many tensors are done, of how many."""

# A model in float32, or a float32 island in a narrower one: its parameter was compared.
_NO_WEIGHT = "the model computes with the parameter itself"

_NOT_LAST = "it is not the last step there"

Pool = tuple[str, int, str]
"""Tensors whose rounding is taken together: kind, update, and of an optimizer which moment."""


class StepComparer(Protocol):
    """Compares the tensors of one step."""

    def run(self) -> Iterator[int]:
        """Compares everything; yields after each group of tensors how many there were."""


@dataclass(kw_only=True)
class Found:
    """The parts of a ``TensorComparison`` so far; ``notes`` are the keys of a dict, so each is there once."""

    findings: list[Finding] = field(default_factory=list)
    differences: list[TensorDifference] = field(default_factory=list)
    unusable: list[Finding] = field(default_factory=list)
    conflicts: tuple[list[ReplicaConflict], list[ReplicaConflict]] = field(default_factory=lambda: ([], []))
    absences: list[Absence] = field(default_factory=list)
    flips: list[ExpertFlips] = field(default_factory=list)
    ledgers: list[LedgerComparison] = field(default_factory=list)
    notes: dict[Note, None] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    num_located: int = 0
    num_exact: int = 0
    is_by_content: bool = False
    unmatched: tuple[Unmatched, ...] = ()
    absent_steps: tuple[AbsentSteps, ...] = ()
    has_two_precisions: bool = False
    squares: list[GradientSquare] = field(default_factory=list)
    keys: dict[int, tuple[frozenset[TraceKey], frozenset[TraceKey]]] = field(default_factory=dict)

    def extend(self, part: Found) -> None:
        """Adds the results of the step that follows, which were found apart."""
        self.findings += part.findings
        self.differences += part.differences
        self.unusable += part.unusable
        for conflicts, more in zip(self.conflicts, part.conflicts, strict=True):
            conflicts.extend(more)
        self.absences += part.absences
        self.flips += part.flips
        self.ledgers += part.ledgers
        self.squares += part.squares
        self.notes |= part.notes
        self.num_located += part.num_located
        self.num_exact += part.num_exact
        self.is_by_content |= part.is_by_content

    def sort(self) -> None:
        """Puts the differences in the order training computes them."""
        position = {key: index for index, key in enumerate(order_keys(item.key for item in self.differences))}
        self.differences.sort(key=lambda item: position[item.key])

    def result(self, steps: tuple[int, ...], *, level: Literal["full", "sketch"] = "full") -> TensorComparison:
        """Returns all of it."""
        not_compared = list_not_compared(self.absences)
        compared = {difference.key.kind for difference in self.differences}
        keys = order_keys({item.key for side in self.conflicts for item in side})
        position = {key: index for index, key in enumerate(keys)}
        # Found name by name, so that the first would be anyone.
        conflicts = [tuple(sorted(side, key=lambda item: position[item.key])) for side in self.conflicts]
        return TensorComparison(
            steps=steps,
            differences=tuple(self.differences),
            findings=(*self.findings, *find_faults(self.absences)),
            baseline_conflicts=conflicts[0],
            candidate_conflicts=conflicts[1],
            unusable=tuple(sorted(self.unusable, key=lambda item: (item.step, item.update or 0))),
            level=level,
            not_compared=not_compared,
            flips=tuple(self.flips),
            ledgers=tuple(self.ledgers),
            notes=(*self.notes, *find_empty_kinds(not_compared, compared)),
            numbers=dict(self.numbers),
            num_located=self.num_located,
            num_exact=self.num_exact,
            is_by_content=self.is_by_content,
            unmatched=self.unmatched,
            absent_steps=self.absent_steps,
            has_two_precisions=self.has_two_precisions,
        )


def walk_steps(
    sources: tuple[StepSource, StepSource],
    selection: Selection,
    found: Found,
    open_step: Callable[[StepSides], StepComparer],
    on_key: OnKey | None,
    *,
    compare_apart: Callable[[Sequence[int]], Iterator[Found]] | None = None,
) -> tuple[int, ...]:
    """Compares every selected step of both traces, and their ledgers; returns these steps.

    ``open_step``: makes the comparer of one step. ``compare_apart``: compares steps elsewhere, each as ``walk_step``
    with results of its own, and yields these in order; ``None``: they are compared here.

    Raises:
        TraceError: A file is damaged.
    """
    ours, theirs = (source.steps for source in sources)
    found.has_two_precisions = are_other(selection.precisions)
    # Steps of one side alone are findings and no reason to stop.
    steps = tuple(step for step in sorted(set(ours) & set(theirs)) if selection.has_step(step))
    missing, found.absent_steps = split_missing_steps(ours, theirs, selection, is_traced=True)
    found.findings += [
        Finding(kind="step", step=step, update=None, name=f"step {step}", fact=OnlyIn(side=other_side(side)))
        for step, side in missing
    ]
    # All keys first: progress needs their number before the first is compared.
    keys = found.keys = {step: (sources[0].keys(step), sources[1].keys(step)) for step in steps}
    total, done = sum(len(mine | other) for mine, other in keys.values()), 0
    apart = None if compare_apart is None else compare_apart(steps)
    for step in steps:
        if apart is None:
            counts = walk_step(sources, step, selection, found, open_step, is_first=step == steps[0])
        else:
            found.extend(next(apart))
            counts = iter([len(keys[step][0] | keys[step][1])])
        for num_keys in counts:
            done += num_keys
            if on_key is not None:
                on_key(done, total)
    common = {key for mine, other in keys.values() for key in mine & other}
    found.unmatched = find_unmatched(selection, common, {ledger.kind for ledger in found.ledgers})
    # Walked by name, reported in the order of computation.
    found.sort()
    return steps


def walk_step(
    sources: tuple[StepSource, StepSource],
    step: int,
    selection: Selection,
    found: Found,
    open_step: Callable[[StepSides], StepComparer],
    *,
    is_first: bool,
) -> Iterator[int]:
    """Compares one step and its ledgers; yields after each group of tensors how many there were."""
    keys = found.keys.setdefault(step, (sources[0].keys(step), sources[1].keys(step)))
    sides = StepSides.read(sources, step, keys, selection, found, is_first=is_first)
    yield from open_step(sides).run()
    found.ledgers += compare_ledgers(sources, step, selection, found.notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSides:
    """Holds both sides of one step.

    Args:
        step: Global step.
        keys: Tensors of each side.
        footers: Of the first rank of each side.
        is_partial: Some ranks of a side wrote nothing.
        selection: Of the comparison.
        found: Results so far.
        is_first: It is the first step compared.
        is_by_content: Rows of a side are by content: nothing but their identities and inputs shows that both are the
            same.
    """

    step: int
    keys: tuple[frozenset[TraceKey], frozenset[TraceKey]]
    footers: tuple[StepFooter, StepFooter]
    is_partial: tuple[bool, bool]
    selection: Selection
    found: Found
    is_first: bool
    is_by_content: bool = False

    @classmethod
    def read(
        cls,
        sources: tuple[StepSource, StepSource],
        step: int,
        keys: tuple[frozenset[TraceKey], frozenset[TraceKey]],
        selection: Selection,
        found: Found,
        *,
        is_first: bool,
    ) -> StepSides:
        """Reads them; rows not the same on both sides are findings."""
        ours, theirs = sources
        # Rows and selection are the same on every rank, so that the first rank's footer stands for all.
        footers = (ours.footers(step)[0][1], theirs.footers(step)[0][1])
        is_partial = (not ours.is_complete(step), not theirs.is_complete(step))
        is_by_content = ours.is_by_content(step) or theirs.is_by_content(step)
        # A rank lists its own rows then, and nothing is known of a rank's that wrote no trace.
        may_lack = is_partial if is_by_content else (False, False)
        found.findings += find_row_differences(step, *footers, may_lack=may_lack)
        found.is_by_content |= is_by_content
        if is_by_content and not any(key.kind == "input" for key in keys[0] & keys[1]):
            found.notes[InputsNotCompared()] = None
        return cls(
            step=step,
            keys=keys,
            footers=footers,
            is_partial=is_partial,
            selection=selection,
            found=found,
            is_first=is_first,
            is_by_content=is_by_content,
        )

    @property
    def all_keys(self) -> list[TraceKey]:
        """The tensors of either side, in the order training computes them."""
        return order_keys(self.keys[0] | self.keys[1])

    def is_selected(self, key: TraceKey) -> bool:
        """Whether a tensor is to be compared."""
        return self.selection.has_kind(key.kind) and self.selection.has_name(key.name)

    def is_data(self, key: TraceKey) -> bool:
        """Whether a tensor shows that both runs trained on the same data, so it is compared whatever is selected."""
        return self.is_by_content and key.kind == "input"

    def is_recomputed(self, key: TraceKey) -> bool:
        """Whether a tensor has what a recomputation made otherwise, in the candidate alone, and is to be compared.

        It is no tensor of both runs; where the baseline breaks the law too, this says nothing of the candidate.
        """
        return key.kind == "recomputed" and key not in self.keys[0] and self.is_selected(key)

    def has_both(self, key: TraceKey, *, is_reported: bool = True) -> bool:
        """Whether both sides have a tensor; if not, keeps the absence with its reason."""
        present = [key in keys for keys in self.keys]
        if not all(present) and is_reported:
            # One side has it, or the key would not be walked.
            place = present.index(False)
            absence = explain_absence(key, SIDES[place], self.footers[place], is_partial=self.is_partial[place])
            if key.kind == "weight" and replace(key, kind="parameter") in self.keys[place]:
                absence = replace(absence, reason=NotShown(reason=_NO_WEIGHT))
            # A run traces its moments at its end, whatever kinds it was to trace.
            is_untold = key.kind == "optimizer" and key.kind not in self.footers[place].kinds
            if is_untold and self.selection.stated[place].last != key.step:
                absence = replace(absence, reason=NotShown(reason=_NOT_LAST))
            self.found.absences.append(absence)
        return all(present)

    def find_unobserved(self) -> list[Absence]:
        """Finds tensors both runs were asked for and neither shows."""
        absences = []
        named = {(key.kind, key.name) for keys in self.keys for key in keys}
        for side, footer in zip(SIDES, self.footers, strict=True):
            for item in footer.unobserved:
                key = TraceKey(step=self.step, update=0, kind=item.kind, name=item.name)
                # What one side shows is an absence on the other, which the walk itself finds.
                if "*" not in item.name and (item.kind, item.name) not in named and self.is_selected(key):
                    absences.append(Absence(key=key, side=side, reason=NotShown(reason=item.reason)))
        return absences


@dataclass(frozen=True, kw_only=True, slots=True)
class Unrounded:
    """A difference whose bound lacks the rounding of its pool.

    Args:
        position: Among the differences.
        bound: Of its tensor.
        unit: Spacing at 1 of its numbers.
        distance: ``||a - b||``.
        size: ``||a||``.
        pool: Tensors whose rounding is taken together.
    """

    position: int
    bound: TensorBound
    unit: float
    distance: float
    size: float
    pool: Pool


class RoundingPools:
    """The mean square of all baseline tensors of a kind and update, by which their rounding is measured."""

    def __init__(self) -> None:
        self._squares: dict[Pool, tuple[float, int]] = {}
        self.unrounded: list[Unrounded] = []

    def add(
        self, key: TraceKey, *, position: int, bound: TensorBound, unit: float, distance: float, size: float, count: int
    ) -> None:
        """Adds one tensor of ``count`` elements; the rest as in ``Unrounded``."""
        # The two moments of an optimizer are a gradient and its square, of which no size is common.
        pool = (key.kind, key.update, key.name.rpartition(".")[2] if key.kind == "optimizer" else "")
        # Norms add by squares; of the baseline only, so that the candidate cannot widen its own bound.
        total, elements = self._squares.get(pool, (0.0, 0))
        self._squares[pool] = (total + size * size, elements + count)
        self.unrounded.append(
            Unrounded(position=position, bound=bound, unit=unit, distance=distance, size=size, pool=pool)
        )

    def mean_square(self, pool: Pool) -> float:
        """Returns Σa² / n over all tensors of a pool."""
        total, count = self._squares[pool]
        # By elements and not by tensors: a small bias must not make a large matrix's rounding coarse.
        return total / max(count, 1)
