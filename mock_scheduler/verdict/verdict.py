"""The verdict on one candidate and its proofs, as facts; ``wording`` says them.

``identical``: everything compared is bit-equal, and so are all replicas. ``identical (emulated)``: the candidate is
bit-equal to a reference in its order of sums. ``rounding``: nothing is beyond its bound. ``suspect``: nothing is, but
a test found a slope, a place or a drift that noise does not make; or only estimated bounds are exceeded; or sketches
cannot tell on which side of its bound a tensor is; or a difference beyond its bound is gone in float64, or equals that
of a reference for which neither noise nor theory nor float64 vouches. ``diverged``: something is beyond its bound, or
missing on one side, or replicas disagree. ``incomparable``: the required kinds were not compared, the two runs were
told to trace different things, or neither is a reference. ``unverified``: the runs could not show that they are
deterministic.
``direct_verdict.decide`` makes the kind from differences; ``final_verdict.judge`` changes it by proofs.

An alignment tries the proofs strongest first and stops where one decides. ``replicas``: copies within the candidate's
own run agree. ``bit-equality``: every tensor has the baseline's bits. ``emulation``: every tensor has the bits of a
reference that adds in the candidate's order. ``equal inputs``: a tensor whose inputs are equal to the last bit differs
by no more than one kernel rounds. ``noise``: a perturbation by one unit roundoff bounds the difference of
every tensor, with tests of slope, locality and drift beside the norm. ``referee``: both sides again in float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from mock_scheduler.comparison.bounds.bounds import Bounds
from mock_scheduler.comparison.findings import Finding
from mock_scheduler.comparison.noise.one_kernel import KernelExcess
from mock_scheduler.comparison.noise.suspicions import Suspicion, TestSummary
from mock_scheduler.comparison.tensors import TensorComparison, TensorDifference
from mock_scheduler.comparison.walk.metrics import MetricComparison
from mock_scheduler.errors import ExitCode
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.coverage import Unseen
from mock_scheduler.verdict.divergences import Divergence
from mock_scheduler.verdict.reasons import NotTried, ProofName, Reason


class VerdictKind(StrEnum):
    """Names the relation of a candidate to its baseline."""

    IDENTICAL = "identical"
    EMULATED = "identical (emulated)"
    ROUNDING = "rounding"
    SUSPECT = "suspect"
    DIVERGED = "diverged"
    INCOMPARABLE = "incomparable"
    UNVERIFIED = "unverified"

    @property
    def exit_code(self) -> ExitCode:
        """Returns the exit code of a command with this verdict."""
        return _EXIT_CODES[self]

    @property
    def passes(self) -> bool:
        """Whether a command would end with 0 on it."""
        return self.exit_code is ExitCode.ALIGNED


#: Every verdict with its exit code, the gravest first: one table for commands, reports and counts.
_EXIT_CODES = {
    VerdictKind.DIVERGED: ExitCode.DIVERGED,
    VerdictKind.SUSPECT: ExitCode.SUSPECT,
    VerdictKind.INCOMPARABLE: ExitCode.INCOMPARABLE,
    VerdictKind.UNVERIFIED: ExitCode.UNVERIFIED,
    VerdictKind.ROUNDING: ExitCode.ALIGNED,
    VerdictKind.EMULATED: ExitCode.ALIGNED,
    VerdictKind.IDENTICAL: ExitCode.ALIGNED,
}

#: All kinds, in the order of that table.
GRAVEST_FIRST = tuple(_EXIT_CODES)

#: The kinds of which a further proof would say nothing: there is no comparison to judge.
WITHOUT_COMPARISON = frozenset({VerdictKind.INCOMPARABLE, VerdictKind.UNVERIFIED})


def worst_exit_code(kinds: Iterable[VerdictKind]) -> ExitCode:
    """The exit code of the gravest verdict; ``ALIGNED`` where there is none."""
    present = set(kinds)
    return next((kind.exit_code for kind in GRAVEST_FIRST if kind in present), ExitCode.ALIGNED)


Outcome = Literal["proved", "refuted", "open", "not tried"]
"""``proved``: the demand of the proof holds. ``refuted``: it does not. ``open``: it cannot tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnChanges:
    """Holds all changes of a candidate with a chance to move a bit.

    Args:
        keys: Configuration keys with values of its own.
        entry: The module of its processes; empty where it is the baseline's.
        versions: Packages of other versions, as ``torch 2.13.0 instead of 2.14.1``.
    """

    keys: tuple[str, ...] = ()
    entry: str = ""
    versions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualityFacts:
    """Whether bits had to be equal: ``may_round`` where a candidate changes more than the order of its sums."""

    changes: OwnChanges
    may_round: bool
    is_same_order: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulationFacts:
    """The layout in whose order the reference adds; ``may_round`` as in ``EqualityFacts``.

    ``not_followed``: sums that the reference left in an order of their own. ``assumed``: sums that it made as they
    usually are. ``precision``: the coarser one of baseline and candidate, where they are two; else empty.
    """

    layout: str
    may_round: bool
    precision: str = ""
    not_followed: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualInputsFacts:
    """Tensors of which every input is equal to the last bit to those of a reference that adds in the same order.

    Args:
        judged: In the order of computation; the first has nothing but equal tensors before it, each other one stands
            behind grafts of those before.
        excess: The first of them with more than one kernel's rounding, and by how much; ``None`` where none has.
        is_complete: Every difference of the pass follows from these.
        error: Why nothing could be judged; empty else.
        broken: A clip that is not that of the candidate's own norm; ``None`` where there is none.
    """

    judged: tuple[TraceKey, ...] = ()
    excess: tuple[TensorDifference, KernelExcess] | None = None
    is_complete: bool = False
    error: str = ""
    broken: Finding | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RefereeFacts:
    """Holds the largest relative difference in float64 (``worst``) and in the runs' own precision (``worst_here``).

    ``shrinking``: how many times smaller rounding is in float64. ``is_same_place``: both first differ in one tensor.
    """

    worst: float
    worst_here: float
    shrinking: float
    is_same_place: bool


ProofFacts = EqualityFacts | EmulationFacts | EqualInputsFacts | RefereeFacts | ReplicaConflict | Finding | NotTried


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Holds the finding of one proof.

    Args:
        facts: Its own figures; the conflict of replicas, or the finding on a recomputation; why it was not tried.
        compared: The judged comparison; ``None`` where there is none.
        num_compared: Tensors of the comparison.
        num_equal: Tensors with equal bits.
        seconds: Runs and comparisons for it alone. ``AlignmentTimes`` has the shared runs.
    """

    name: ProofName
    outcome: Outcome
    facts: ProofFacts | None = None
    compared: Verdict | None = None
    num_compared: int = 0
    num_equal: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Holds the verdict on one candidate.

    Args:
        kind: The relation of the candidate to its baseline.
        why: The reason, as facts.
        first: The earliest divergence in the order of computation; ``None`` where nothing diverged.
        metrics: Compared metrics; ``None`` where a run failed or they were not asked for.
        tensors: Compared tensors; ``None`` likewise.
        bounds: The bounds of both; ``None`` where nothing was compared with bounds.
        suspicions: Systematic differences within their bounds, in the order of computation.
        tests: The extent of each test for them; empty where no noise was measured.
        full_dump: After a comparison of sketches, the overrides of the full trace to take next; else empty.
        proofs: Strongest first; empty outside of an alignment, and where nothing could be compared.
        unseen: Modules and parameters that the comparison did not look at; ``None`` where there are none.
    """

    kind: VerdictKind
    why: Reason
    first: Divergence | None = None
    metrics: MetricComparison | None = None
    tensors: TensorComparison | None = None
    bounds: Bounds | None = None
    suspicions: tuple[Suspicion, ...] = ()
    tests: tuple[TestSummary, ...] = ()
    full_dump: tuple[str, ...] = ()
    proofs: tuple[Proof, ...] = ()
    unseen: Unseen | None = None

    @property
    def exit_code(self) -> ExitCode:
        """Returns the exit code of its kind."""
        return self.kind.exit_code

    @property
    def passes(self) -> bool:
        """Whether a command would end with 0 on it."""
        return self.kind.passes

    def proof(self, name: ProofName) -> Proof | None:
        """The proof of this name; ``None`` where the verdict has none."""
        return next((proof for proof in self.proofs if proof.name == name), None)

    def __str__(self) -> str:
        """Returns one line: ``diverged: first in gradient of output_layer.weight at step 0, update 0``."""
        if self.first is not None:
            return f"{self.kind.value}: first in {self.first}"
        compared = [] if self.metrics is None else [f"{len(self.metrics.differences):,} metrics"]
        compared += [] if self.tensors is None else [f"{len(self.tensors.differences):,} tensors"]
        missed = []
        if self.unseen is not None and (self.unseen.modules or self.unseen.parameters):
            missed = [f"{len(self.unseen.modules):,} modules", f"{len(self.unseen.parameters):,} parameters"]
        if self.unseen is not None:
            missed += [f"steps {item.steps}" for item in self.unseen.steps]
            missed += ["last moments"] if self.unseen.last_state else []
        not_seen = f", not {' and '.join(missed)}" if missed else ""
        return f"{self.kind.value}: compared {' and '.join(compared) or 'nothing'}{not_seen}"
