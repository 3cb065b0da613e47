"""The decisions of localisation, without any run: where a divergence begins, out of the differences of two runs.

Contract: pure. A tensor *differs* where its bits do, or where it is beyond its bound; where one run alone has it, or is
not finite; or where copies within the candidate disagree. The order is ``compare.pairing.order``'s.

*Grafts.* The first differing tensor of a pass is a cause, for all before it is equal. With the reference's tensor put
in its place, every tensor that becomes equal only passed the difference on, and the first one still different is
another cause. So each run finds one cause, until nothing differs. The facts of a localisation are collected out of the
walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from mock_scheduler.comparison.findings import OtherDtype
from mock_scheduler.comparison.pairing.order import order_keys
from mock_scheduler.comparison.tensors import TensorComparison
from mock_scheduler.config.instruments import TRACE_KINDS
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.verdict.localisation import (
    DifferingTensor,
    GraftedModule,
    GraftEnd,
    GraftEndCause,
    GraftKind,
    Localisation,
    PassName,
    module_kind,
    pass_of,
)


def find_differing(comparison: TensorComparison, *, is_exact: bool) -> list[DifferingTensor]:
    """Lists all differing tensors, in execution order; ``is_exact``: equal means equal bits, else within the bounds."""
    found: dict[TraceKey, DifferingTensor] = {}
    for item in comparison.differences:
        if not item.bit_equal if is_exact else item.exceeds:
            found[item.key] = DifferingTensor(key=item.key, difference=item)
    measured = {item.key: item for item in comparison.differences}
    for finding in comparison.findings:
        if finding.kind in TRACE_KINDS and not finding.is_selection:
            key = TraceKey(step=finding.step, update=finding.update or 0, kind=finding.kind, name=finding.name)
            # Of two dtypes the values are measured all the same, and their inputs may be equal.
            difference = measured.get(key) if isinstance(finding.fact, OtherDtype) else None
            found[key] = DifferingTensor(key=key, difference=difference, finding=finding)
    for conflict in comparison.candidate_conflicts:
        key = conflict.key
        found[key] = DifferingTensor(key=key, difference=measured.get(key), conflict=conflict)
    return [found[key] for key in order_keys(found)]


def find_first_step(comparison: TensorComparison, *, is_exact: bool) -> int | None:
    """Finds the first step with a difference; ``None`` without any.

    An undecided sketch counts only where nothing is certain.
    """
    steps = [item.key.step for item in find_differing(comparison, is_exact=is_exact)]
    # An earlier undecided step could be rounding, and would send all further runs to the wrong place.
    steps = steps or [item.key.step for item in comparison.undecided]
    return min(steps, default=None)


def in_pass(differing: Sequence[DifferingTensor], key: TraceKey) -> list[DifferingTensor]:
    """Selects the tensors in the same pass of the same update as ``key``."""
    place = (key.step, key.update, pass_of(key))
    return [item for item in differing if (item.key.step, item.key.update, pass_of(item.key)) == place]


@dataclass(kw_only=True, slots=True)
class GraftWalk:
    """Holds a walk from cause to cause through one pass; ``before``: its differing tensors without a graft, in order.

    Ask ``next_names`` for the tensors to put in; run that; tell ``see`` the tensors still differing in the pass.
    ``is_there``: whether the reference's trace has a tensor to put in. ``end``: why no further run is made; ``None``
    where all is explained.
    """

    before: Sequence[DifferingTensor]
    max_runs: int
    is_there: Callable[[TraceKey], bool] = lambda key: True
    causes: list[DifferingTensor] = field(default_factory=list)
    healed: list[list[DifferingTensor]] = field(default_factory=list)
    remaining: list[DifferingTensor] = field(default_factory=list)
    end: GraftEnd | None = None
    num_runs: int = 0

    def __post_init__(self) -> None:
        self.remaining = list(self.before)

    @property
    def kind(self) -> GraftKind:
        """Returns the kind of the grafts."""
        return "activation_gradient" if pass_of(self.before[0].key) == "backward" else "activation"

    def next_names(self) -> tuple[str, ...]:
        """Names the tensors to put in next: every cause and the first tensor still differing; empty at the end."""
        if self.end is not None or not self.remaining:
            return ()
        cause = self._find_end(self.remaining[0])
        if cause is not None:
            self.end = GraftEnd(cause=cause, key=self.remaining[0].key, num_runs=self.num_runs)
            return ()
        return (*(item.key.name for item in self.causes), self.remaining[0].key.name)

    def _find_end(self, first: DifferingTensor) -> GraftEndCause | None:
        if any(first.key == cause.key for cause in self.causes):
            return GraftEndCause.STILL_DIFFERS
        if first.lacks_tokens:
            return GraftEndCause.TOKENS_NOWHERE
        if not first.can_be_grafted:
            return GraftEndCause.NO_GRAFT
        if not self.is_there(first.key):
            return GraftEndCause.NOT_TRACED
        return GraftEndCause.RUNS_SPENT if self.num_runs >= self.max_runs else None

    def see(self, differing: Sequence[DifferingTensor]) -> None:
        """Take note of the differing tensors of the same pass in the run with ``next_names`` put in."""
        cause, still = self.remaining[0], {item.key for item in differing}
        self.num_runs += 1
        self.causes.append(cause)
        # Equal with the graft and different without it: the tensor only passed the difference on.
        self.healed.append([item for item in self.remaining[1:] if item.key not in still])
        self.remaining = list(differing)

    def give_up(self, error: str) -> None:
        """Take note of a failed run with ``next_names``."""
        first = self.remaining[0].key
        self.end = GraftEnd(cause=GraftEndCause.RUN_FAILED, key=first, num_runs=self.num_runs, error=error)

    @property
    def is_explained(self) -> bool:
        """Whether the causes account for every difference in the pass."""
        return bool(self.causes) and not self.remaining


def find_reduction_faults(differing: Sequence[DifferingTensor], key: TraceKey) -> list[DifferingTensor]:
    """Lists the differing main gradients of the update of ``key``, behind equal activations and their equal gradients.

    Their own reduction or accumulation makes the difference.
    """
    return [item for item in differing if item.key.update == key.update and pass_of(item.key) == "gradient"]


#: The passes in the order of a step.
_ORDER: tuple[PassName, ...] = get_args(PassName)
#: A step's main gradients are made in its backward pass, and its loss ends its forward pass.
_PHASES: dict[PassName, str] = {"gradient": "backward", "loss": "forward"}


def build_localisation(
    origin: DifferingTensor,
    differing: Sequence[DifferingTensor],
    comparison: TensorComparison,
    *,
    walk: GraftWalk | None,
    reductions: Sequence[DifferingTensor],
    is_exact: bool,
    trace_dirs: tuple[Path, Path],
    seconds: float,
) -> Localisation:
    """Collects the facts of one localisation.

    Args:
        origin: The first differing tensor, explained.
        differing: The differing tensors of the origin's step without a graft, in order.
        comparison: Of the same step.
        walk: Through the origin's pass; ``None`` where nothing can be put in.
        reductions: Main gradients with a difference of their own, behind the grafts.
        is_exact: Whether equal means equal bits; else within the bounds.
        trace_dirs: Reference and candidate.
        seconds: All runs and comparisons.
    """
    key, name = origin.key, pass_of(origin.key)
    also = in_pass(differing, key)
    bad = {item.key for item in differing}
    upto = [item.key for item in comparison.differences if _is_upto(item.key, key)]
    return Localisation(
        step=key.step,
        update=key.update,
        phase=_PHASES.get(name, name),
        name=key.name,
        origin=origin,
        is_exact=is_exact,
        made_by=_find_maker(key, comparison),
        causes=() if walk is None else _list_causes(walk, comparison),
        amplifiers=() if walk is None else _list_amplifiers(walk),
        num_before=_count_before(comparison, key),
        num_others=0 if walk is None else len(walk.before) - len(walk.causes),
        remaining=() if walk is None else tuple(item.key.name for item in walk.remaining),
        end=None if walk is None else walk.end,
        reductions=tuple(reductions),
        also=tuple(also[1:]),
        num_equal=sum(other not in bad for other in upto),
        num_alike=0 if walk is None else _count_alike(walk, comparison),
        num_later=sum(not _is_upto(item.key, key) for item in differing),
        law=next((item for item in differing if item.breaks_law), None),
        trace_dirs=trace_dirs,
        seconds=seconds,
    )


def _count_alike(walk: GraftWalk, comparison: TensorComparison) -> int:
    """Counts the modules of the causes' kind in their pass, where each of them is a cause, or as many as were looked
    at.

    0 where there is one cause, or causes of two kinds, or other modules of the kind are right.
    """
    kinds = {module_kind(item.key.name) for item in walk.causes}
    if len(walk.causes) < 2 or len(kinds) > 1:
        return 0
    first = walk.causes[0].key
    count = sum(
        (item.key.step, item.key.update, pass_of(item.key)) == (first.step, first.update, pass_of(first))
        and module_kind(item.key.name) in kinds
        for item in comparison.differences
    )
    is_cut_short = walk.end is not None and walk.end.cause is GraftEndCause.RUNS_SPENT
    return count if count == len(walk.causes) or is_cut_short else 0


def _list_causes(walk: GraftWalk, comparison: TensorComparison) -> tuple[GraftedModule, ...]:
    return tuple(
        GraftedModule(
            name=item.key.name,
            kind=walk.kind,
            is_cause=True,
            relative=item.relative,
            tensor=item,
            made_by=_find_maker(item.key, comparison),
            num_healed=len(healed),
        )
        for item, healed in zip(walk.causes, walk.healed, strict=True)
    )


def _list_amplifiers(walk: GraftWalk) -> tuple[GraftedModule, ...]:
    """Lists each module mended by a graft before it, in order, and compares it with the cause."""
    return tuple(
        GraftedModule(
            name=item.key.name,
            kind=walk.kind,
            is_cause=False,
            relative=item.relative,
            cause=cause.key.name,
            growth=item.relative / cause.relative if item.relative is not None and cause.relative else None,
        )
        for cause, healed in zip(walk.causes, walk.healed, strict=True)
        for item in healed
    )


def _find_maker(key: TraceKey, comparison: TensorComparison) -> str:
    """Finds the module whose backward pass comes before a gradient at an output; empty for any other tensor."""
    if pass_of(key) != "backward":
        return ""
    keys = [item.key for item in comparison.differences if pass_of(item.key) == "backward"]
    same = [other for other in keys if (other.step, other.update) == (key.step, key.update)]
    place = same.index(key) if key in same else 0
    return same[place - 1].name if place else "loss"


def _is_upto(key: TraceKey, origin: TraceKey) -> bool:
    """Says whether a tensor belongs to the origin's pass or one before it, in the origin's step and update."""
    place = (key.update, _ORDER.index(pass_of(key)))
    return key.step == origin.step and place <= (origin.update, _ORDER.index(pass_of(origin)))


def _count_before(comparison: TensorComparison, key: TraceKey) -> int:
    """Counts the compared tensors of the step before this one."""
    keys = [item.key for item in comparison.differences if item.key.step == key.step]
    return keys.index(key) if key in keys else 0
