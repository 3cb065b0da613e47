"""What the differences of two runs mean for where a divergence begins: the decisions of localisation, without any run.

Contract: pure. A tensor *differs* where its bits do, or where it is beyond its bound; where one run alone has it, or is
not finite; or where copies within the candidate disagree. The order is that of ``compare.order``.

*Grafts.* Of what differs in one pass of one update, the first that a module shows is a cause, for all before it is
equal. With the reference's tensor put in its place, whatever is then equal only passed the difference on, and the first
that still differs is another cause. So each run finds one cause, until nothing differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mock_scheduler.compare.pairing.order import order_keys
from mock_scheduler.compare.tensors import TensorComparison, TensorDifference
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.kinds import PHASES, TRACE_KINDS, Phase
from mock_scheduler.verdict.wording.findings import describe_finding

GraftKind = Literal["activation", "activation_gradient"]
PassName = Literal["start", "inputs", "forward", "scores", "loss", "backward", "gradient", "update"]
"""Which part of a step a tensor is of; ``gradient``: main gradients, behind the backward pass."""

_PASSES: dict[Phase, PassName] = {
    Phase.START: "start",
    Phase.DATA: "inputs",
    Phase.FORWARD: "forward",
    Phase.SCORES: "scores",
    Phase.LOSS: "loss",
    Phase.BACKWARD: "backward",
    Phase.GRADIENT: "gradient",
    Phase.NORM: "update",
    Phase.UPDATE: "update",
}
_CHOICE = ".chosen_experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Differing:
    """One tensor that differs. difference: what was measured; ``None`` where nothing could be. problem: then what is
    wrong, or how copies within the candidate disagree; else empty. lacks_tokens: as of a ``Finding``. relative:
    ``None`` where there is no number."""

    key: TraceKey
    difference: TensorDifference | None = None
    problem: str = ""
    lacks_tokens: bool = False

    @property
    def relative(self) -> float | None:
        """||a - b|| / ||a||."""
        return None if self.difference is None else self.difference.relative

    @property
    def can_be_grafted(self) -> bool:
        """Whether a module shows it, in both runs, as something that can be put in."""
        key = self.key
        is_shown = key.kind in ("activation", "router", "logits", "activation_gradient")
        has_one_form = self.difference is not None and self.difference.dtypes is None
        return is_shown and has_one_form and not key.name.endswith(_CHOICE)


def find_differing(comparison: TensorComparison, *, is_exact: bool) -> list[Differing]:
    """All that differs, in execution order. is_exact: whether equal means equal bits, or within the bounds."""
    found: dict[TraceKey, Differing] = {}
    for item in comparison.differences:
        if not item.bit_equal if is_exact else item.exceeds:
            found[item.key] = Differing(key=item.key, difference=item)
    measured = {item.key: item for item in comparison.differences}
    for finding in comparison.findings:
        if finding.kind in TRACE_KINDS and not finding.is_selection:
            key = TraceKey(step=finding.step, update=finding.update or 0, kind=finding.kind, name=finding.name)
            found[key] = Differing(key=key, problem=describe_finding(finding), lacks_tokens=finding.lacks_tokens)
    for conflict in comparison.candidate_conflicts:
        text = f"copies within the candidate differ: {conflict.describe()}"
        found[conflict.key] = Differing(key=conflict.key, difference=measured.get(conflict.key), problem=text)
    return [found[key] for key in order_keys(found)]


def find_first_step(comparison: TensorComparison, *, is_exact: bool) -> int | None:
    """The first step at which anything differs; ``None`` where none does.

    Where a sketch cannot tell on which side of its bound a tensor is, that counts only if nothing is certain.
    """
    steps = [item.key.step for item in find_differing(comparison, is_exact=is_exact)]
    steps = steps or [item.key.step for item in comparison.undecided]
    return min(steps, default=None)


def pass_of(key: TraceKey) -> PassName:
    """Which part of a step computes a tensor."""
    return _PASSES[PHASES[key.kind]]


def in_pass(differing: Sequence[Differing], key: TraceKey) -> list[Differing]:
    """Of these, what the same pass of the same update computes."""
    place = (key.step, key.update, pass_of(key))
    return [item for item in differing if (item.key.step, item.key.update, pass_of(item.key)) == place]


@dataclass(kw_only=True, slots=True)
class GraftWalk:
    """Which modules of one pass are causes. ``before``: all that differs in it without a graft, in order.

    Ask ``next_names`` for what to put in; run that; tell ``see`` what still differs in the pass. is_there: whether the
    reference's trace has a tensor to put in. ended: why no further run is made; empty where all is explained.
    """

    before: Sequence[Differing]
    max_runs: int
    is_there: Callable[[TraceKey], bool] = lambda key: True
    causes: list[Differing] = field(default_factory=list)
    healed: list[list[Differing]] = field(default_factory=list)
    remaining: list[Differing] = field(default_factory=list)
    ended: str = ""
    num_runs: int = 0

    def __post_init__(self) -> None:
        self.remaining = list(self.before)

    @property
    def kind(self) -> GraftKind:
        """Of the grafts."""
        return "activation_gradient" if pass_of(self.before[0].key) == "backward" else "activation"

    def next_names(self) -> tuple[str, ...]:
        """The names to put in next: every cause so far and the first that still differs; empty where it has ended."""
        if self.ended or not self.remaining:
            return ()
        first = self.remaining[0]
        if any(first.key == cause.key for cause in self.causes):
            self.ended = f"{first.key.name} differs although the reference's tensor was put in"
        elif first.lacks_tokens:
            self.ended = (
                f"tokens of {first.key.name} are held by no rank, so there is nothing in whose place the reference's "
                "could be put; the cause lies in which rows the ranks were given, not in a module"
            )
        elif not first.can_be_grafted:
            self.ended = f"{first.key.name} ({first.key.kind.replace('_', ' ')}) is nothing that can be put in"
        elif not self.is_there(first.key):
            self.ended = f"{first.key.name} is not in the reference's trace, which has the first that differ alone"
        elif self.num_runs >= self.max_runs:
            self.ended = f"no further run was made after {self.max_runs}; the next cause would be {first.key.name}"
        if self.ended:
            return ()
        return (*(cause.key.name for cause in self.causes), first.key.name)

    def see(self, differing: Sequence[Differing]) -> None:
        """What differs in the same pass of the run with ``next_names`` put in; none of the rest of the step."""
        cause, still = self.remaining[0], {item.key for item in differing}
        self.num_runs += 1
        self.causes.append(cause)
        self.healed.append([item for item in self.remaining[1:] if item.key not in still])
        self.remaining = list(differing)

    def give_up(self, reason: str) -> None:
        """The run with ``next_names`` could not be made."""
        self.ended = reason

    @property
    def is_explained(self) -> bool:
        """Whether the causes account for all that differed in the pass."""
        return bool(self.causes) and not self.remaining


def find_reduction_faults(differing: Sequence[Differing], key: TraceKey) -> list[Differing]:
    """Main gradients of the update of ``key`` that differ though all activations and their gradients are as the
    reference has them: their own reduction or accumulation does it."""
    return [item for item in differing if item.key.update == key.update and pass_of(item.key) == "gradient"]
