"""Differences without a number, as plain data; ``verdict.wording.findings`` puts them into words.

A *finding* is a fault: something is missing on one side, or cannot be subtracted. An *absence* without fault is listed
as not compared. A *note* is another limit of a comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mock_scheduler.comparison.residuals import Residual, Side
from mock_scheduler.config.instruments import LedgerKind, TraceKind
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.replicas import SketchConflict
from mock_scheduler.trace.stated_steps import AbsenceReason

DifferenceKind = TraceKind | Literal["metric", "step", "rows", "ledger", "recording"]
"""What differs: a traced tensor of a kind; a metric; a whole step; the rows of a batch; a sequence of calls; a step of
a recording."""

SIDES: tuple[Side, Side] = ("baseline", "candidate")


def other_side(side: Side) -> Side:
    """Returns the other of the two sides."""
    return "candidate" if side == "baseline" else "baseline"


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlyIn:
    """One side alone has the tensor or the step."""

    side: Side


@dataclass(frozen=True, kw_only=True, slots=True)
class AbsentSteps:
    """Steps that ``side`` does not have, as it was configured; the other one has them."""

    side: Side
    why: AbsenceReason
    steps: StepRanges


@dataclass(frozen=True, kw_only=True, slots=True)
class NotLogged:
    """A metric, or all metrics of a step, missing in ``absent``.

    Args:
        absent: The side without it.
        num_missing: Steps at which the metric is missing; ``None`` for all metrics of one step.
        num_steps: Steps logged by both sides.
    """

    absent: Side
    num_missing: int | None = None
    num_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherShape:
    """The two sides have other shapes."""

    baseline: tuple[int, ...]
    candidate: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherDtype:
    """The two sides have other dtypes, by name."""

    baseline: str
    candidate: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherCount:
    """The two sides have other numbers of elements."""

    baseline: int
    candidate: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherPlaces:
    """Tokens or elements with a value on one side alone."""

    what: Literal["token", "element"]
    num_baseline: int
    num_candidate: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LacksTokens:
    """No rank of the candidate holds some tokens; ``missing``: as the trace's reader says it."""

    missing: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite:
    """How many elements of a tensor are NaN and infinite."""

    num_nan: int
    num_infinite: int
    num_elements: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NotFinite:
    """NaN or infinity on one side or on both; ``None`` for a side with finite elements only."""

    baseline: NonFinite | None
    candidate: NonFinite | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiesDiffer:
    """Ranks of one side hold other values of one tensor, at level ``sketch``."""

    side: Side
    conflict: SketchConflict


RoundingRule = Literal["towards zero", "to a neighbour", "other values"]
"""How values were rounded that are not the nearest ones: cut off, one of the two neighbours, or not at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundedOtherwise:
    """The start of ``side``, which computes in ``dtype``, is not the other side's, rounded to nearest."""

    side: Side
    dtype: str
    num_different: int
    num_elements: int
    how: RoundingRule


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherStart:
    """The runs start from other weights.

    Args:
        residual: Explains the difference.
        same_as: The parameter of the baseline the candidate has in its place.
        rounded: How the narrower side of two precisions rounded the other's; ``None`` of one precision.
    """

    residual: Residual | None = None
    same_as: str | None = None
    rounded: RoundedOtherwise | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LacksParameter:
    """The trace does not have the parameter before an update, or the parameter of a weight."""

    needed_by: Literal["update", "weight"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherWeight:
    """The weight the model computes with is not the rounded parameter in ``side``.

    ``is_of_before``: it is that of before the update.
    """

    side: Side
    is_of_before: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowedState:
    """The candidate keeps state in fewer bits than its type and the baseline have; from one tensor on, all of a kind.

    Args:
        num_bits: Of mantissa, in the candidate; ``baseline_bits`` likewise.
        num_tensors: Tensors of the kind, step and update that this holds of.
    """

    num_bits: int
    baseline_bits: int
    num_tensors: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NormCount:
    """A sum of squares that makes the stated norm of gradients.

    Args:
        form: ``copies``: what ranks of ``place``, an axis, hold as copies is added once for each of them. ``part``: the
            ranks at ``place``, as ``tp0``, have added what they hold, and nobody else. ``without``: tensors are left
            out.
        place: An axis, or a place on one; empty for ``without``.
        names: Tensors that this is done with, their numbers as ``*``; empty for all.
    """

    form: Literal["copies", "part", "without"]
    place: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherNorm:
    """The candidate's norm of gradients is not the norm of its own gradients, and the baseline's is.

    Args:
        stated: The candidate's own.
        made: Of its merged gradients, in float64; the mean over the updates of a metric's step.
        count: A mistake that makes the stated one; ``None`` where none was found.
    """

    stated: float
    made: float
    count: NormCount | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherClip:
    """The candidate's gradients were not clipped by one coefficient, or not by that of their norm.

    Args:
        factor: The coefficient over that of the ranks at ``than``, of the other parameters, or else over that which the
            baseline's clip makes of the candidate's norm.
        place: The ranks with a coefficient of their own, as ``tp1``; empty where all have one.
        than: The ranks that they are compared with.
        names: Parameters with coefficients of their own; ``factor`` is the smallest.
    """

    factor: float
    place: str = ""
    than: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRecomputation:
    """The candidate's backward pass computed a module again, and got other bits than its forward pass had.

    Args:
        num_different: Elements with other bits; 0 where the values of the forward pass are not known.
        num_elements: Elements of the micro-batches concerned; likewise.
        relative: ``||first - second|| / ||first||`` of these; ``None`` likewise.
        sample: Identity of the row of the first such token; empty likewise.
        position: Of this token in it.
        micro_batch: Of the rank that holds this token, from 0; ``None`` likewise.
    """

    num_different: int = 0
    num_elements: int = 0
    relative: float | None = None
    sample: str = ""
    position: int = 0
    micro_batch: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NotTraced:
    """A side was told not to trace a tensor: ``values`` of its ``trace.kinds``, ``patterns`` or ``exclude``."""

    setting: Literal["kinds", "patterns", "exclude"]
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NotSelected:
    """``num_tensors`` tensors of a kind traced by the other side; ``side`` was told not to."""

    side: Side
    num_tensors: int
    reason: NotTraced


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsOnlyIn:
    """Rows of a step in one side alone.

    Args:
        side: Of the rows.
        num_rows: How many.
        num_all: Rows of the side.
        first: Identities of the first few.
    """

    side: Side
    num_rows: int
    num_all: int
    first: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLength:
    """How many tokens a row has on each side."""

    identity: str
    baseline: int
    candidate: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherLengths:
    """Rows with another length on each side: how many, and the first of them."""

    num_rows: int
    first: tuple[RowLength, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherNumUpdates:
    """The two sides make other numbers of updates in a step."""

    baseline: int
    candidate: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherUpdateRows:
    """An update trains on other rows; the counts are of rows on one side alone, ``first``: one of these."""

    update: int
    num_baseline: int
    num_candidate: int
    first: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherInput:
    """A row of the same identity has other inputs: tokens, labels or loss mask.

    Args:
        row: Identity of the first such row; empty where sketches alone were compared, and nothing below is known.
        position: Of the first such token in it.
        baseline: Its value.
        candidate: Likewise.
        num_tokens: How many tokens have another value.
    """

    row: str = ""
    position: int = 0
    baseline: float | None = None
    candidate: float | None = None
    num_tokens: int = 0


Fact = (
    OnlyIn
    | NotLogged
    | OtherShape
    | OtherDtype
    | OtherCount
    | OtherPlaces
    | LacksTokens
    | NotFinite
    | CopiesDiffer
    | OtherStart
    | LacksParameter
    | OtherWeight
    | OtherNorm
    | NarrowedState
    | OtherClip
    | OtherRecomputation
    | NotSelected
    | RowsOnlyIn
    | OtherLengths
    | OtherNumUpdates
    | OtherUpdateRows
    | OtherInput
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One difference without a number, where it first appears; ``update``: ``None`` where it belongs to no update.

    ``place``: of its tensor's key.
    """

    kind: DifferenceKind
    step: int
    update: int | None
    name: str
    fact: Fact
    place: int | None = None

    @property
    def is_selection(self) -> bool:
        """Whether the two runs were told to trace other things, so it says nothing about their computation."""
        return isinstance(self.fact, NotSelected)

    @property
    def is_other_data(self) -> bool:
        """Whether it says that the two runs trained on other rows, or on other tokens of one row."""
        return self.kind == "rows" or isinstance(self.fact, OtherInput)

    @property
    def lacks_tokens(self) -> bool:
        """Whether the candidate has the tensor, but no rank of it holds some of its tokens."""
        return isinstance(self.fact, LacksTokens)


def finding(key: TraceKey, fact: Fact) -> Finding:
    """Makes a finding on one tensor."""
    return Finding(kind=key.kind, step=key.step, update=key.update, name=key.name, fact=fact, place=key.place)


@dataclass(frozen=True, kw_only=True, slots=True)
class NotShown:
    """The model does not show the tensor, as a fused norm; ``reason``: from the trace."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NotWritten:
    """Only these global ranks wrote the trace."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NotCompared:
    """A tensor not shown by one or both runs, without fault.

    Args:
        kind: Of the tensor.
        name: Canonical.
        sides: The runs without it.
        reasons: Why not, each once.
        first_step: The first step without it.
        num_steps: How many steps are without it.
    """

    kind: TraceKind
    name: str
    sides: tuple[Side, ...]
    reasons: tuple[NotShown | NotWritten, ...]
    first_step: int
    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unmatched:
    """A chosen kind or pattern of which both sides have nothing in common; ``nearest``: names that they have."""

    what: Literal["kind", "pattern"]
    chosen: str
    nearest: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerNotCompared:
    """A ledger of one side alone; ``only``: ``None`` where the layouts are not the same, or other settings are."""

    kind: LedgerKind
    only: Side | None
    has_other_settings: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PartlyWritten:
    """One side alone has some elements of a tensor, since some ranks wrote no trace."""

    key: TraceKey
    places: OtherPlaces


@dataclass(frozen=True, kw_only=True, slots=True)
class SketchTokensNotCompared:
    """Sketches of tokens in other orders cannot be compared, at one step."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SketchWeightsNotCompared:
    """Whether a weight is the rounded parameter is judged bit by bit, and sketches do not show bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KindNotCompared:
    """Both traces were asked for a kind, and none of its tensors was compared; ``names``: of its tensors."""

    kind: TraceKind
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FewerBits:
    """The candidate's gradients are sums of coarser numbers, or of fewer, than the baseline's.

    Args:
        step: Of the first such update.
        update: Likewise.
        only: The only gradient of this update that differs; else empty.
        divisor: What they are multiplied by to be short numbers.
        num_bits: The mean bits of mantissa that they then have in the candidate; ``baseline_bits`` likewise.
    """

    step: int
    update: int
    only: str = ""
    divisor: int
    num_bits: float
    baseline_bits: float


@dataclass(frozen=True, kw_only=True, slots=True)
class InputsNotCompared:
    """No input is in both traces: rows are known to be the same by their identities alone."""


Note = (
    FewerBits
    | InputsNotCompared
    | LedgerNotCompared
    | PartlyWritten
    | SketchTokensNotCompared
    | SketchWeightsNotCompared
    | KindNotCompared
)
