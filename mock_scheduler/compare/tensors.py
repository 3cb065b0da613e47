"""What the comparison of two traces found, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mock_scheduler.compare.differences import Figures, Locality, Residual, Tier
from mock_scheduler.compare.findings import Finding, Side
from mock_scheduler.config.trace import TRACE_KINDS, LedgerKind, TraceKind
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import ReplicaConflict

#: The kinds that a verdict must have compared.
JUDGED_KINDS: tuple[TraceKind, ...] = ("gradient", "parameter")

#: The kinds of which <a, b> / <a, a> tells something: what is compared as it is, and no choice of experts.
SLOPE_KINDS: frozenset[TraceKind] = frozenset({"activation", "logits", "output", "activation_gradient", "gradient"})

#: A tensor whose bound is larger than this is not judged: ``judging`` says why.
LARGEST_BOUND = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """One tensor that both runs have.

    ``relative``: what is bounded, as ``judging`` says, in float64; a is the baseline; 0/0 = 0, x/0 = inf. It is
    ``distance`` by ``size``: ||a - b|| and ||a||, or of a parameter those of the change by the update.
    ``tolerance``: the bound of ``relative``. ``max_abs``: the largest |a - b|; 0 at level ``sketch``, which does not
    know it.
    ``is_estimate``: the bound was extrapolated, so that what is beyond it is suspicious only.
    ``num_elements``: that were compared. ``num_excluded``: of these, elements of a parameter that had no say.
    ``num_absent``: elements of the canonical tensor that were not compared, being masked out or on one side only.
    ``num_flipped_tokens``: tokens left out because rounding chose other experts for them.
    ``num_decisions``: elements of an update that was judged as ``decisions`` says, 0 of any other;
    ``num_flipped_decisions``: of these, those that are not the baseline's.
    ``is_zero``: the baseline's gradient or change is 0.
    ``is_within_ulp``: no element is further than ``bounds.NUM_ULPS`` units in the last place.
    ``figures``: of the compared elements; ``None`` where their bits are equal, and at level ``sketch``.
    ``localities``, ``residual``: of the first and the largest beyond their tolerance; empty elsewhere. Of a tensor that
    is within its bound, ``localities`` are places that differ by more than their own measured noise.
    ``dtypes``: of baseline and candidate, where they are not the same; the difference is then that of the values.
    ``low``, ``high``: at level ``sketch``, the error bar of ``relative``; ``None`` at level ``full``.
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
    dtypes: tuple[str, str] | None = None
    low: float | None = None
    high: float | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether the tensor is large enough against its rounding for an error to be told from it."""
        return self.tolerance <= LARGEST_BOUND

    @property
    def is_judged(self) -> bool:
        """Whether it says anything of the two runs; equal bits always do."""
        return self.bit_equal or self.is_bounded

    @property
    def exceeds(self) -> bool:
        """Whether it is beyond its tolerance, at level ``sketch`` with its whole error bar; NaN is."""
        return not (self.relative if self.low is None else self.low) <= self.tolerance

    @property
    def is_undecided(self) -> bool:
        """Whether the tolerance lies within the error bar of a sketch."""
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
        return "ulp" if self.is_within_ulp else "tolerance"

    @property
    def margin(self) -> float:
        """How many times the difference would fit into the tolerance; inf where there is none, below 1 beyond it."""
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
class NotCompared:
    """A tensor that one or both runs do not show, for a reason that is no fault, at ``num_steps`` steps.

    ``sides``: the runs that do not have it. ``reason``: in words, such as that a norm is fused into the layer after it.
    """

    kind: TraceKind
    name: str
    sides: tuple[Side, ...]
    reason: str
    first_step: int
    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertFlips:
    """Tokens for which rounding chose other experts, of ``num_tokens``, at one choice of experts.

    A flip is rounding where every expert that only one run chose is as near to the others' logits as the router's
    logits of that token themselves moved. ``largest_gap``: between these experts' logits in the baseline.
    """

    key: TraceKey
    num_tokens: int
    num_flipped: int
    largest_gap: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerComparison:
    """The calls of one kind in one step, rank by rank; ``num_calls``: that are equal, over all ranks.

    ``difference``: the first one that is not, in words; ``None`` where all are equal.
    """

    kind: LedgerKind
    step: int
    num_ranks: int
    num_calls: int
    difference: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorComparison:
    """All tensors, in execution order; ``steps`` are those that both runs traced.

    ``unusable``: tensors that are not finite in either run, so that there is nothing to compare.
    ``level``: ``sketch`` where at least one side has no whole tensors: figures are then estimates.
    ``notes``: what limits the comparison without being a difference, in words: parts written by some ranks only,
    ledgers that were not compared.
    ``numbers``: of the layouts, by name, that a wrong factor may be. ``num_located``: tensors within their bound in
    which places that stand out were looked for.
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
    notes: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    num_located: int = 0

    @property
    def exceeding(self) -> tuple[TensorDifference, ...]:
        """Tensors beyond their tolerance, in execution order."""
        return tuple(difference for difference in self.differences if difference.exceeds)

    @property
    def flipped_decisions(self) -> tuple[TensorDifference, ...]:
        """Updates within their bound of which elements decided differently, in execution order."""
        return tuple(item for item in self.differences if item.num_flipped_decisions and not item.exceeds)

    @property
    def undecided(self) -> tuple[TensorDifference, ...]:
        """Tensors whose sketches cannot tell on which side of the tolerance they are, in execution order."""
        return tuple(difference for difference in self.differences if difference.is_undecided)

    @property
    def kinds(self) -> tuple[TraceKind, ...]:
        """The kinds that were compared, in the order in which a step computes them."""
        compared = {difference.key.kind for difference in self.differences}
        return tuple(kind for kind in TRACE_KINDS if kind in compared)

    def group(self, kind: TraceKind, *, step: int | None = None) -> TensorGroup | None:
        """The aggregate of one kind, of all steps or of ``step``; ``None`` where none was compared."""
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
            worst=min([item for item in chosen if item.is_judged] or chosen, key=lambda item: item.margin),
            num_unjudged=sum(not item.is_judged for item in chosen),
            fraction_excluded=sum(item.num_excluded for item in chosen)
            / max(sum(item.num_elements for item in chosen), 1),
        )
