"""Holds the compared tensors of two traces: the result of a comparison, as plain data.

A difference has figures and a tolerance; the words *relative*, *tolerance* and *margin* are defined in ``thresholds``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mock_scheduler.comparison.findings import AbsentSteps, Finding, NotCompared, Note, Unmatched
from mock_scheduler.comparison.residuals import Locality, Residual, Spread
from mock_scheduler.comparison.thresholds import LARGEST_BOUND
from mock_scheduler.config.instruments import TRACE_KINDS, LedgerKind, TraceKind
from mock_scheduler.trace.entries import LedgerCall, RankPlace, TraceKey
from mock_scheduler.trace.full.reader import ReplicaConflict

#: The kinds that a verdict must have compared.
JUDGED_KINDS: tuple[TraceKind, ...] = ("gradient", "parameter")

#: The kinds of which <a, b> / <a, a> tells something: what is compared as it is, and no choice of experts.
SLOPE_KINDS: frozenset[TraceKind] = frozenset({"activation", "logits", "output", "activation_gradient", "gradient"})


Tier = Literal["identical", "ulp", "tolerance", "diverged"]
"""``identical``: equal bits. ``ulp``: no element is further than ``bounds.NUM_ULPS`` units in the last place.
``tolerance``: within its bound. ``diverged``: beyond it. Each is at least as strict as the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstElement:
    """Holds the element with the largest ``|a - b|``.

    Args:
        index: In the canonical tensor.
        baseline: Its value there.
        candidate: Its value there.
        sample: In a token tensor, identity of the row.
        position: In a token tensor, of the token in its row.
        baseline_ranks: Ranks holding it.
        candidate_ranks: Ranks holding it.
    """

    index: tuple[int, ...]
    baseline: float
    candidate: float
    sample: str | None = None
    position: int | None = None
    baseline_ranks: tuple[RankPlace, ...] = ()
    candidate_ranks: tuple[RankPlace, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """All figures of a - b over the compared elements, in float64; a is the baseline.

    Args:
        num_elements: Elements compared.
        num_different: Elements with other bits.
        max_abs: The largest ``|a - b|``.
        norm: ``||a - b||``.
        relative: ``||a - b|| / ||a||``; 0/0 = 0, x/0 = inf.
        slope: ``<a, b> / <a, a>``; 1 where both are 0.
        cosine: 1 where both are 0.
        max_ulp: The largest distance in representable numbers of the dtype; ``None`` for integers.
        worst: ``None`` where nothing differs.
    """

    num_elements: int
    num_different: int
    max_abs: float
    norm: float
    relative: float
    slope: float
    cosine: float
    max_ulp: int | None
    worst: WorstElement | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """Holds one tensor of both runs.

    Args:
        key: Its canonical key.
        num_elements: Elements compared.
        bit_equal: All bits are equal.
        max_abs: The largest ``|a - b|``; 0 at level ``sketch``, where it is not known.
        relative: The bounded figure (``measure.distance``): distance / size, in float64.
        tolerance: The bound of ``relative``.
        distance: ``||a - b||``; of a parameter, the distance of the changes by the update.
        size: ``||a||``; of a parameter, of the change by the update.
        is_estimate: The bound was extrapolated; beyond it, the tensor is suspicious only.
        num_excluded: Elements of a parameter without a say in ``relative``.
        num_absent: Elements of the canonical tensor masked out or on one side only.
        num_flipped_tokens: Tokens left out because rounding chose other experts for them.
        num_decisions: Elements of an update judged by its decisions (``explain.expert_bias``); 0 of any other.
        num_flipped_decisions: Decisions unlike the baseline's.
        is_zero: The baseline's gradient or change is 0.
        is_within_ulp: No element is further away than ``NUM_ULPS`` units in the last place.
        figures: ``None`` where bits are equal, and at level ``sketch``.
        localities: Of the first and the largest beyond their tolerance; of a tensor within its bound, places that
            differ by more than their own measured noise.
        residual: Of the first and the largest beyond their tolerance.
        spread: Of these too.
        dtypes: Of both sides, where they differ; the values are then compared.
        low: At level ``sketch``, the lower end of the error bar of ``relative``; ``None`` at level ``full``.
        high: The upper end.
    """

    key: TraceKey
    num_elements: int
    bit_equal: bool
    max_abs: float
    relative: float
    tolerance: float
    distance: float = 0.0
    size: float = 0.0
    is_estimate: bool = False
    num_excluded: int = 0
    num_absent: int = 0
    num_flipped_tokens: int = 0
    num_decisions: int = 0
    num_flipped_decisions: int = 0
    is_zero: bool = False
    is_within_ulp: bool = False
    figures: Figures | None = None
    localities: tuple[Locality, ...] = ()
    residual: Residual | None = None
    spread: Spread | None = None
    dtypes: tuple[str, str] | None = None
    low: float | None = None
    high: float | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether the tensor is large enough against its rounding for an error to show."""
        return self.tolerance <= LARGEST_BOUND

    @property
    def is_judged(self) -> bool:
        """Whether it says anything about the two runs; equal bits always do."""
        return self.bit_equal or self.is_bounded

    @property
    def exceeds(self) -> bool:
        """Whether it is beyond its tolerance, at level ``sketch`` with its whole error bar. NaN is beyond."""
        # Written as "not within" so that NaN, of which every comparison is false, is beyond its bound.
        return not (self.relative if self.low is None else self.low) <= self.tolerance

    @property
    def is_undecided(self) -> bool:
        """Whether the tolerance lies within the error bar of a sketch."""
        # "Not within" here too: an upper end that is NaN decides nothing.
        return self.high is not None and not self.exceeds and not self.high <= self.tolerance

    @property
    def slope(self) -> float | None:
        """<a, b> / <a, a>; 1 where the bits are equal; ``None`` at level ``sketch`` where they are not."""
        if self.figures is not None:
            return self.figures.slope
        return 1.0 if self.bit_equal else None

    @property
    def tier(self) -> Tier:
        """How far the two are apart, in one word."""
        if self.bit_equal:
            return "identical"
        if self.exceeds:
            return "diverged"
        # An element can be few units away and its tensor still beyond its bound, so the bound comes first.
        return "ulp" if self.is_within_ulp else "tolerance"

    @property
    def margin(self) -> float:
        """Tolerance / relative: how often the difference fits into the tolerance; inf for none, below 1 beyond it."""
        # No difference fits into every tolerance, also into one of 0.
        return math.inf if self.relative == 0 else self.tolerance / self.relative


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """All compared tensors of one kind, of one step or of all: how many, how many bit-equal, and the worst judged."""

    kind: TraceKind
    num_compared: int
    num_bit_equal: int
    worst: TensorDifference
    fraction_excluded: float
    num_unjudged: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertFlips:
    """Holds tokens for which rounding chose other experts, of ``num_tokens``, at one choice of experts.

    A flip is rounding where every expert only one run chose is as near to the others' logits as the router's logits of
    the token themselves moved. ``largest_gap``: between these experts' logits in the baseline.
    """

    key: TraceKey
    num_tokens: int
    num_flipped: int
    largest_gap: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerDifference:
    """Holds the first unequal call of two sequences.

    Args:
        position: In the sequence of the rank, or of the group.
        calls: Of both sequences; ``None`` where a sequence has ended.
        num_calls: Length of both sequences.
        places: The rank in both runs; or two ranks of one run, whose collectives of ``group`` are compared.
        group: Global ranks; empty between two runs.
    """

    position: int
    calls: tuple[LedgerCall | None, LedgerCall | None]
    num_calls: tuple[int, int]
    places: tuple[RankPlace, ...]
    group: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerComparison:
    """Holds the calls of one kind in one step, rank by rank.

    Args:
        kind: Of the ledger.
        step: Global step.
        num_ranks: Ranks with such a ledger.
        num_calls: Equal calls, over all ranks.
        difference: The first unequal call; ``None`` where all are equal.
    """

    kind: LedgerKind
    step: int
    num_ranks: int
    num_calls: int
    difference: LedgerDifference | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorComparison:
    """Holds all tensors of two traces, in execution order.

    Args:
        steps: Traced by both runs.
        differences: One for each tensor of both runs.
        findings: Faults without a number.
        baseline_conflicts: Copies within the baseline with other values.
        candidate_conflicts: Copies within the candidate with other values.
        unusable: Tensors with NaN or infinity in both runs, with nothing to compare.
        level: ``sketch`` where at least one side has no whole tensors: figures are then estimates.
        not_compared: Tensors not shown by both runs, which is no fault.
        flips: Choices of experts changed by rounding.
        ledgers: Sequences of calls.
        notes: Limits of the comparison.
        numbers: Numbers of the layouts, by name, which a wrong factor may be.
        num_located: Tensors within their bound in which places were looked for.
        num_exact: Tensors of which every bit must be as expected, and is: initial parameters and rounded weights.
        unmatched: Chosen kinds and patterns without a tensor, or ledger, of both sides.
        is_by_content: Nobody told a side's training its rows: it has data of its own, and no rollouts.
        absent_steps: Steps of one side alone that the other one says it does not have, or not trace.
        has_two_precisions: The two runs state different ones.
    """

    steps: tuple[int, ...]
    differences: tuple[TensorDifference, ...]
    findings: tuple[Finding, ...]
    baseline_conflicts: tuple[ReplicaConflict, ...]
    candidate_conflicts: tuple[ReplicaConflict, ...]
    unusable: tuple[Finding, ...] = ()
    level: Literal["full", "sketch"] = "full"
    not_compared: tuple[NotCompared, ...] = ()
    flips: tuple[ExpertFlips, ...] = ()
    ledgers: tuple[LedgerComparison, ...] = ()
    notes: tuple[Note, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    num_located: int = 0
    num_exact: int = 0
    unmatched: tuple[Unmatched, ...] = ()
    is_by_content: bool = False
    absent_steps: tuple[AbsentSteps, ...] = ()
    has_two_precisions: bool = False

    @property
    def last_measured(self) -> tuple[int, int] | None:
        """Step and update behind which no bound was measured; ``None`` where all bounds hold.

        Rounding has turned a decision there, or weights were stored in two types: each rounds the update itself, which
        no perturbed run of one type shows.
        """
        turned = [(item.key.step, item.key.update) for item in self.flipped_decisions]
        first = [(self.steps[0], 0)] if self.has_two_precisions and self.steps else []
        return min([*turned, *first], default=None)

    @property
    def is_empty(self) -> bool:
        """Whether not one element and not one call was compared, beside those of ``num_exact``."""
        # A tensor of no elements is equal to any other one, and proves nothing.
        has_elements = any(difference.num_elements for difference in self.differences)
        return not has_elements and not any(ledger.num_calls or ledger.difference for ledger in self.ledgers)

    def has_elements(self, kind: TraceKind) -> bool:
        """Whether an element of a tensor of this kind was compared."""
        return any(item.num_elements for item in self.differences if item.key.kind == kind)

    @property
    def exceeding(self) -> tuple[TensorDifference, ...]:
        """Returns tensors beyond their tolerance, in execution order."""
        return tuple(difference for difference in self.differences if difference.exceeds)

    @property
    def flipped_decisions(self) -> tuple[TensorDifference, ...]:
        """Updates within their bound of which elements decided differently, in execution order."""
        return tuple(item for item in self.differences if item.num_flipped_decisions and not item.exceeds)

    @property
    def undecided(self) -> tuple[TensorDifference, ...]:
        """Tensors whose error bar has the tolerance in it, in execution order."""
        return tuple(difference for difference in self.differences if difference.is_undecided)

    @property
    def kinds(self) -> tuple[TraceKind, ...]:
        """The compared kinds, in the order a step computes them."""
        compared = {difference.key.kind for difference in self.differences}
        return tuple(kind for kind in TRACE_KINDS if kind in compared)

    def group(self, kind: TraceKind, *, step: int | None = None) -> TensorGroup | None:
        """Returns the aggregate of one kind, of all steps or of ``step``; ``None`` where none was compared."""
        chosen = [
            difference
            for difference in self.differences
            if difference.key.kind == kind and step in (None, difference.key.step)
        ]
        if not chosen:
            return None
        return TensorGroup(
            kind=kind,
            num_compared=len(chosen),
            num_bit_equal=sum(difference.bit_equal for difference in chosen),
            # The smallest margin rather than the largest difference: bounds differ from tensor to tensor.
            worst=min([item for item in chosen if item.is_judged] or chosen, key=lambda item: item.margin),
            num_unjudged=sum(not item.is_judged for item in chosen),
            fraction_excluded=sum(item.num_excluded for item in chosen)
            / max(sum(item.num_elements for item in chosen), 1),
        )
