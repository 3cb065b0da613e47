"""Where a divergence begins, as facts; ``wording.localisation`` says them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from mock_scheduler.comparison.findings import Finding, OtherClip, OtherRecomputation
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.entries import PHASES, Phase, TraceKey
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.trace.names import OUTPUT_LAYER

GraftKind = Literal["activation", "activation_gradient"]
PassName = Literal["start", "inputs", "recomputation", "forward", "scores", "loss", "backward", "gradient", "update"]
"""The part of a step that computes a tensor, in order; ``gradient``: main gradients, behind the backward pass."""

_PASSES: dict[Phase, PassName] = {
    Phase.START: "start",
    Phase.DATA: "inputs",
    Phase.RECOMPUTATION: "recomputation",
    Phase.FORWARD: "forward",
    Phase.SCORES: "scores",
    Phase.LOSS: "loss",
    Phase.BACKWARD: "backward",
    Phase.GRADIENT: "gradient",
    # The norm is taken for clipping, which belongs to the update.
    Phase.NORM: "update",
    Phase.UPDATE: "update",
}
_CHOICE = ".chosen_experts"


def pass_of(key: TraceKey) -> PassName:
    """The part of a step in which a tensor is computed."""
    return _PASSES[PHASES[key.kind]]


def module_kind(name: str) -> str:
    """The kind of a module by its canonical name, as ``norm``: instances of a kind may have one fault."""
    last = name.rpartition(".")[2]
    if "norm" in last:
        return "norm"
    if last.startswith("linear_") or last == OUTPUT_LAYER.partition(".")[0]:
        return "linear layer"
    return "layer" if last.isdecimal() else last


@dataclass(frozen=True, kw_only=True, slots=True)
class DifferingTensor:
    """Holds one differing tensor.

    Args:
        difference: The measured figures; ``None`` where nothing could be measured.
        finding: Then the reason; or two dtypes, beside the figures.
        conflict: How copies within the candidate disagree, where they do.
    """

    key: TraceKey
    difference: TensorDifference | None = None
    finding: Finding | None = None
    conflict: ReplicaConflict | None = None

    @property
    def relative(self) -> float | None:
        """||a - b|| / ||a||; ``None`` where there is no number."""
        return None if self.difference is None else self.difference.relative

    @property
    def lacks_tokens(self) -> bool:
        """Whether no rank of the candidate holds some of its tokens."""
        return self.finding is not None and self.finding.lacks_tokens

    @property
    def breaks_law(self) -> bool:
        """Whether the candidate's own run contradicts itself there: in copies, a recomputation, or a clip."""
        fact = None if self.finding is None else self.finding.fact
        return self.conflict is not None or isinstance(fact, OtherRecomputation | OtherClip)

    @property
    def can_be_grafted(self) -> bool:
        """Whether a module shows it, in both runs, in one form."""
        key = self.key
        # A graft must have the run's bits, hence one dtype; a choice of experts follows from logits, which are grafted.
        is_shown = key.kind in ("activation", "router", "logits", "activation_gradient")
        has_one_form = self.difference is not None and self.difference.dtypes is None
        return is_shown and has_one_form and not key.name.endswith(_CHOICE)


class GraftEndCause(StrEnum):
    """Why no further graft was made although something still differs."""

    STILL_DIFFERS = "still differs"
    TOKENS_NOWHERE = "tokens nowhere"
    NO_GRAFT = "no graft"
    NOT_TRACED = "not traced"
    RUNS_SPENT = "runs spent"
    RUN_FAILED = "run failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class GraftEnd:
    """Holds the end of the grafts at the tensor ``key``, after ``num_runs`` runs; ``error``: of a failed run."""

    cause: GraftEndCause
    key: TraceKey
    num_runs: int = 0
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraftedModule:
    """Holds the finding of the grafts on one module.

    Args:
        name: Canonical name.
        is_cause: With its tensor replaced by the reference's, what follows is as the reference has it, up to the next
            cause. Else it only passes on the difference of ``cause``.
        relative: ||a - b|| / ||a|| without a graft; ``None`` where there is no number.
        tensor: Of a cause, its tensor.
        made_by: Of a cause in the backward pass, as ``Localisation.made_by``.
        num_healed: Of a cause, the number of mended tensors behind it.
        cause: Of any other, the name of the cause before it.
        growth: Of any other, its relative difference / the cause's; ``None`` where either has no number.
    """

    name: str
    kind: GraftKind
    is_cause: bool
    relative: float | None = None
    tensor: DifferingTensor | None = None
    made_by: str = ""
    num_healed: int = 0
    cause: str = ""
    growth: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Localisation:
    """Holds the beginning of a divergence, as narrowed down by further runs.

    Args:
        step, update, name: Of the first differing tensor, in execution order.
        phase: The part of the step: ``forward``, ``backward``, ``update``, ...
        origin: Its figures.
        is_exact: Whether equal means equal bits; else within the bounds.
        made_by: Of a gradient at a module's output, the module whose backward pass comes before it (``loss``: of
            the loss); else empty.
        causes: Modules whose graft heals the rest, in order.
        amplifiers: Modules behind a cause; they only pass it on or enlarge it. In order.
        num_before: Compared tensors of the step before the origin.
        num_others: Differing tensors of the pass beside the causes.
        remaining: Names of tensors of the pass, still differing with all grafts.
        end: Why no further graft was made; ``None`` where none was needed.
        reductions: Main gradients with a difference of their own, behind the grafts.
        also: Without grafts, the other differing tensors of the same pass.
        num_equal: Without grafts, the equal tensors up to the end of the pass.
        num_later: Without grafts, the differing tensors behind the pass.
        law: The first tensor that breaks a law of the candidate's own run; ``None`` where none does.
        num_alike: The modules of the pass of the causes' one kind, where every one of them that was looked at is a
            cause; else 0.
        trace_dirs: Reference and candidate, kept on disk.
        seconds: All its runs and comparisons.
    """

    step: int
    update: int
    phase: str
    name: str
    origin: DifferingTensor
    is_exact: bool
    trace_dirs: tuple[Path, Path]
    seconds: float
    made_by: str = ""
    causes: tuple[GraftedModule, ...] = ()
    amplifiers: tuple[GraftedModule, ...] = ()
    num_before: int = 0
    num_others: int = 0
    remaining: tuple[str, ...] = ()
    end: GraftEnd | None = None
    reductions: tuple[DifferingTensor, ...] = ()
    also: tuple[DifferingTensor, ...] = ()
    num_equal: int = 0
    num_later: int = 0
    num_alike: int = 0
    law: DifferingTensor | None = None

    @property
    def kind(self) -> TraceKind:
        """Returns the kind of the first differing tensor."""
        return self.origin.key.kind
