"""The decisions of localisation, without any run: where a divergence begins, out of the differences of two runs.

Contract: pure. A tensor *differs* where its bits do, or where it is beyond its bound; where one run alone has it, or is
not finite; or where copies within the candidate disagree. The order is ``compare.pairing.order``'s.

*Grafts.* Of what differs in one pass of one update, the first that a module shows is a cause, for all before it is
equal. With the reference's tensor put in its place, whatever is then equal only passed the difference on, and the first
that still differs is another cause. So each run finds one cause, until nothing differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mock_scheduler.compare.pairing.order import order_keys
from mock_scheduler.compare.tensors import TensorComparison
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.kinds import TRACE_KINDS
from mock_scheduler.verdict.localisation import DifferingTensor, GraftEnd, GraftEndCause, GraftKind, pass_of


def find_differing(comparison: TensorComparison, *, is_exact: bool) -> list[DifferingTensor]:
    """All differing tensors, in execution order; ``is_exact``: equal means equal bits, else within the bounds."""
    found: dict[TraceKey, DifferingTensor] = {}
    for item in comparison.differences:
        if not item.bit_equal if is_exact else item.exceeds:
            found[item.key] = DifferingTensor(key=item.key, difference=item)
    measured = {item.key: item for item in comparison.differences}
    for finding in comparison.findings:
        if finding.kind in TRACE_KINDS and not finding.is_selection:
            key = TraceKey(step=finding.step, update=finding.update or 0, kind=finding.kind, name=finding.name)
            found[key] = DifferingTensor(key=key, finding=finding)
    for conflict in comparison.candidate_conflicts:
        key = conflict.key
        found[key] = DifferingTensor(key=key, difference=measured.get(key), conflict=conflict)
    return [found[key] for key in order_keys(found)]


def find_first_step(comparison: TensorComparison, *, is_exact: bool) -> int | None:
    """The first step at which anything differs; ``None`` where none does.

    An undecided sketch counts only where nothing is certain.
    """
    steps = [item.key.step for item in find_differing(comparison, is_exact=is_exact)]
    steps = steps or [item.key.step for item in comparison.undecided]
    return min(steps, default=None)


def in_pass(differing: Sequence[DifferingTensor], key: TraceKey) -> list[DifferingTensor]:
    """Selects the tensors in the same pass of the same update as ``key``."""
    place = (key.step, key.update, pass_of(key))
    return [item for item in differing if (item.key.step, item.key.update, pass_of(item.key)) == place]


@dataclass(kw_only=True, slots=True)
class GraftWalk:
    """A walk from cause to cause through one pass; ``before``: its differing tensors without a graft, in order.

    Ask ``next_names`` for the tensors to put in; run that; tell ``see`` what still differs in the pass. ``is_there``:
    whether the reference's trace has a tensor to put in. ``end``: why no further run is made; ``None`` where all is
    explained.
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
        """The kind of the grafts."""
        return "activation_gradient" if pass_of(self.before[0].key) == "backward" else "activation"

    def next_names(self) -> tuple[str, ...]:
        """The names to put in next: every cause so far and the first that still differs; empty where it has ended."""
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
        self.healed.append([item for item in self.remaining[1:] if item.key not in still])
        self.remaining = list(differing)

    def give_up(self, error: str) -> None:
        """Say that the run with ``next_names`` could not be made."""
        first = self.remaining[0].key
        self.end = GraftEnd(cause=GraftEndCause.RUN_FAILED, key=first, num_runs=self.num_runs, error=error)

    @property
    def is_explained(self) -> bool:
        """Whether the causes account for every difference in the pass."""
        return bool(self.causes) and not self.remaining


def find_reduction_faults(differing: Sequence[DifferingTensor], key: TraceKey) -> list[DifferingTensor]:
    """Main gradients of the update of ``key`` that differ though all activations and their gradients are as the
    reference has them: their own reduction or accumulation does it."""
    return [item for item in differing if item.key.update == key.update and pass_of(item.key) == "gradient"]
