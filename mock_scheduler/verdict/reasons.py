"""The reasons of a verdict, as facts: one class for each, and ``Reason`` is any of them.

Contract: plain data. A text is in here only where another program wrote it (``error``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from mock_scheduler.comparison.findings import FewerBits, Finding, Unmatched
from mock_scheduler.comparison.pairing.selection import Selection
from mock_scheduler.comparison.tensors import LedgerComparison, TensorDifference
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.full.reader import ReplicaConflict

ProofName = Literal["replicas", "bit-equality", "emulation", "equal inputs", "noise", "referee"]

#: Strongest first.
PROOF_NAMES: tuple[ProofName, ...] = ("replicas", "bit-equality", "emulation", "equal inputs", "noise", "referee")


@dataclass(frozen=True, kw_only=True, slots=True)
class BothBroken:
    """Neither run is a reference: the same tensor is not finite in both."""

    finding: Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingCompared:
    """Nothing was compared, or metrics alone; ``chosen``: by this selection neither side has anything, or ``None``.

    ``unmatched``: the parts of the selection without anything.
    """

    chosen: Selection | None = None
    unmatched: tuple[Unmatched, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class KindsMissing:
    """No tensor (or metric) of these kinds was compared, so the rest proves nothing.

    ``finite metric``: there are metrics, and all of them are NaN or infinite.
    """

    kinds: tuple[TraceKind | Literal["metric", "finite metric"], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NotFound:
    """Both sides have nothing of a chosen kind, or by a chosen pattern, so less was compared than was asked for."""

    unmatched: tuple[Unmatched, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownRollouts:
    """The two runs state the rollouts of no common step, so nothing shows that they trained on the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherDraws:
    """Training draws random numbers, and the two runs drew others: they trained under other masks.

    draws: what draws, as ``hidden_dropout``. layouts: of baseline and candidate, where these differ; ``None`` where one
    layout drew otherwise, as the ledger of draws shows.
    """

    draws: tuple[str, ...]
    layouts: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedOtherThings:
    """The two runs were told to trace different things, and nothing else differs."""

    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingTrained:
    """Every gradient of the baseline is 0, or no update moved a parameter: any change would look equal."""

    still: Literal["gradient", "parameter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingJudged:
    """Tensors were compared and none of ``kind`` (``None``: of any) was judged.

    ``because``: noise is as large as they are; nothing bounds them; or updates are smaller than parameters are stored.
    """

    kind: Literal["gradient", "parameter"] | None
    because: Literal["noise", "no bound", "storage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineConflict:
    """Replicas disagree in the baseline, so it is no reference."""

    conflict: ReplicaConflict


@dataclass(frozen=True, kw_only=True, slots=True)
class Undecided:
    """Sketches cannot tell for so many tensors on which side of its bound each is."""

    num_tensors: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BitEqual:
    """Every bit is equal; ``by_fingerprints``: of sketches, where there are no whole tensors."""

    by_fingerprints: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WithinBounds:
    """Nothing is beyond its bound; ``is_estimated``: the differences are, from sketches."""

    is_estimated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class NotExplainedByNoise:
    """Nothing is beyond its bound, and the verdict's suspicions are still no noise; ``is_estimated`` as above."""

    is_estimated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BeyondBounds:
    """Something is beyond its bound or missing; ``is_estimated``: every exceeded bound was extrapolated."""

    is_estimated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRollouts:
    """The two runs trained on other rollouts, from ``first_step`` on in ``num_steps`` of ``num_shared`` steps."""

    first_step: int
    num_steps: int
    num_shared: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncalibrated:
    """Something differs, and nobody measured the noise: bounds of theory alone hold it; as ``WithinBounds``."""

    is_estimated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherData:
    """Two runs with data of their own trained on other rows, or on other tokens of a row; ``finding``: the first."""

    finding: Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherBatches:
    """Two runs with data of their own trained on other rows in steps that they did not trace; as ``OtherRollouts``."""

    first_step: int
    num_steps: int
    num_shared: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NotReadable:
    """The files of a run cannot be read; ``error``: of the reader."""

    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailed:
    """The candidate's run failed with its own ``error``; ``exit_code`` is 0 where it ended well and ran nothing.

    ``collectives``: where its ranks did not issue the same ones, as a further run of it shows.
    """

    exit_code: int
    error: str
    collectives: LedgerComparison | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StillOpen:
    """The alignment is still going, or was interrupted, before the candidate was run, or judged."""

    missing: Literal["run", "judgement"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NotDeterministic:
    """The runs are not shown to repeat themselves; ``otherwise``: the reason that they would give."""

    otherwise: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class NotRepeated:
    """Two runs of the candidate itself differ, first in ``first``; ``otherwise``: the reason that there would be."""

    first: TensorDifference
    otherwise: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualRecordings:
    """All steps of two recordings are equal to the last bit."""

    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRecordings:
    """Two recordings differ; ``num_equal_steps`` are equal to the last bit."""

    num_equal_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NoCommonStep:
    """No step is in both recordings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefutedBy:
    """A proof of the alignment refutes the candidate; ``is_same_place``: it begins where the direct comparison does."""

    proof: ProofName
    is_same_place: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualToReference:
    """Bits equal those of the reference in the candidate's order; ``vouched_by``: shows that it is a reference.

    ``theory``: it is within the bounds of theory, and no noise was measured. ``None``: nothing does, as the reference
    is itself not within the noise of the baseline.
    """

    vouched_by: Literal["noise", "theory", "referee"] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundingOfPrecision:
    """The two sides compute in different precisions, and the coarser one's rounding is all that is between them.

    is_equal: every bit is equal to the baseline's code in the candidate's precision; else it is within the noise of it.
    otherwise: the reason of the comparison with the baseline.
    """

    precision: str
    is_equal: bool
    otherwise: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class ApartFromReference:
    """The reference in the candidate's order shows more than the baseline; ``is_refuted``: beyond every bound."""

    is_refuted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class VanishesInFloat64:
    """The difference from the baseline is beyond its bounds, and in float64 it is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoarserGradients:
    """Gradients are within their bounds, and sums of coarser numbers than those of the reference in the same order."""

    note: FewerBits


@dataclass(frozen=True, kw_only=True, slots=True)
class StaysInFloat64:
    """The difference is within its bounds, and in float64 it does not shrink as rounding does."""

    otherwise: Reason


Reason = (
    BothBroken
    | NothingCompared
    | KindsMissing
    | NotFound
    | UnknownRollouts
    | OtherDraws
    | TracedOtherThings
    | NothingTrained
    | NothingJudged
    | BaselineConflict
    | Undecided
    | BitEqual
    | WithinBounds
    | Uncalibrated
    | NotExplainedByNoise
    | BeyondBounds
    | OtherRollouts
    | OtherData
    | OtherBatches
    | NotReadable
    | RunFailed
    | StillOpen
    | NotDeterministic
    | NotRepeated
    | EqualRecordings
    | OtherRecordings
    | NoCommonStep
    | RefutedBy
    | EqualToReference
    | RoundingOfPrecision
    | ApartFromReference
    | VanishesInFloat64
    | CoarserGradients
    | StaysInFloat64
)
"""Why a verdict is what it is."""


class NotTriedCause(StrEnum):
    """Why a proof was not tried."""

    ONE_PROCESS = "one process"
    NOT_NEEDED = "not needed"
    BIT_EQUAL = "bit-equal"
    STRONGER_PROOF = "stronger proof"
    TURNED_OFF = "turned off"
    SAME_ORDER = "same order"
    CHANGES_MORE = "changes more"
    ORDER_UNKNOWN = "order unknown"
    RUN_FAILED = "run failed"
    CANNOT_RUN = "cannot run"
    FLOAT64_ALREADY = "float64 already"
    ONE_RUN = "one run"
    NOTHING_MAY_ROUND = "nothing may round"
    NOTHING_COMPARED = "nothing compared"
    NOT_DETERMINISTIC = "not deterministic"


@dataclass(frozen=True, kw_only=True, slots=True)
class NotTried:
    """Why a proof was not tried; ``keys``: configuration keys that it names; ``error``: of a run or a check."""

    cause: NotTriedCause
    keys: tuple[str, ...] = ()
    error: str = ""


#: The reasons that hold until an alignment knows a better one.
NOT_NEEDED = NotTried(cause=NotTriedCause.NOT_NEEDED)
BIT_EQUAL = NotTried(cause=NotTriedCause.BIT_EQUAL)
STRONGER_PROOF = NotTried(cause=NotTriedCause.STRONGER_PROOF)
