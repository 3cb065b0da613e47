"""The contents of all reports of an alignment as plain data: page, terminal and JSON are drawn from it alone.

Contract: ``builder`` makes it from a result and its folders. A short view lacks figures and everything
read from folders.
"""

from __future__ import annotations

from dataclasses import dataclass

from mock_scheduler.report.alignment.curves import Curve
from mock_scheduler.report.alignment.environment import EnvironmentView
from mock_scheduler.report.alignment.heat import ErrorMap
from mock_scheduler.report.alignment.sample import SampleView
from mock_scheduler.report.comparison.view import tensor_anchor
from mock_scheduler.verdict.reasons import ProofName
from mock_scheduler.verdict.verdict import Outcome, VerdictKind
from mock_scheduler.verdict.wording.verdicts import Tone


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofView:
    """One rung of the ladder. num_equal of num_compared tensors, where it compares any; shade: of its outcome."""

    name: ProofName
    outcome: Outcome
    shade: str
    text: str
    num_compared: int
    num_equal: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLine:
    """One differing tensor. relative, bound: as text; ratio: difference / bound in words. details: label, text."""

    step: int
    update: int
    kind: str
    name: str
    relative: str
    bound: str
    ratio: str
    exceeds: bool
    details: tuple[tuple[str, str], ...]

    @property
    def anchor(self) -> str:
        """The end of its address in a page."""
        return tensor_anchor(self.step, self.update, self.kind, self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictView:
    """Holds a verdict in words. headline: one line; reason: its grounds beside proofs; first_divergence: a sentence.

    unseen: modules and parameters that the comparison did not look at, with their shares; empty where there are none.
    outside: of its layout, what could not show in this run; empty where there is nothing.
    """

    kind: VerdictKind
    exit_code: int
    tone: Tone
    headline: str
    reason: str
    first_divergence: str
    proved_by: str
    smallest_error: str
    unseen: str
    outside: str

    @property
    def passes(self) -> bool:
        """The command would end with 0 on it."""
        return self.exit_code == 0

    @property
    def rests_on_bits(self) -> bool:
        """Equal bits decide it, so no share of a bound has a part in it."""
        return self.kind in (VerdictKind.IDENTICAL, VerdictKind.EMULATED)


@dataclass(frozen=True, kw_only=True, slots=True)
class SetupView:
    """A candidate's planned differences from the baseline. entry: its module; empty where it is the baseline's.

    changes: keys with an effect on bits. versions: packages of other versions.
    """

    layout: str
    overrides: tuple[str, ...]
    entry: str
    own_code: str
    changes: tuple[str, ...]
    versions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DifferencesView:
    """Holds tensors beside the baseline's.

    tensors: beyond their bound, or else nearest to it, under ``tensors_heading``; num_tensors: how many there are.
    emulated: the comparison with the reference in its order. lists: further findings: heading, lines, how many.
    """

    worst: TensorLine | None
    emulated: str
    tensors_heading: str
    tensors: tuple[TensorLine, ...]
    num_tensors: int
    error_map: ErrorMap | None
    lists: tuple[tuple[str, tuple[str, ...], int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsView:
    """Holds metrics beside the baseline's. equal: their number, in words; differing: a line for each of the others."""

    equal: str
    differing: tuple[str, ...]
    num_differing: int
    curves: tuple[Curve, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OriginView:
    """The place where the differences begin. localisation: labels and texts; command: opens the traces."""

    localisation: tuple[tuple[str, str], ...]
    command: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsequenceView:
    """The effect of the differences on training, as labels and texts and in a sentence; empty where it is unknown.

    is_asked: the two runs compute in different precisions, so it is what one wants to know of a verdict that passes.
    """

    rows: tuple[tuple[str, str], ...]
    text: str
    is_asked: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """Holds a candidate's run. built: its engines and environments, in words; seconds: label and seconds.

    total_s: from outside, with its own proofs and localisation.
    """

    built: str
    run_dir: str
    log_path: str
    seconds: tuple[tuple[str, float], ...]
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StartView:
    """What a candidate's run started from, in a sentence and as labels and texts; empty of a run without attach."""

    text: str
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateView:
    """Holds one candidate, by sections of the page.

    layout_name, option: of its name where that is ``layout.option`` or a layout; else empty. proofs: all, strongest
    first.
    """

    name: str
    anchor: str
    layout_name: str
    option: str
    setup: SetupView
    start: StartView
    verdict: VerdictView
    proofs: tuple[ProofView, ...]
    differences: DifferencesView
    metrics: MetricsView
    origin: OriginView
    consequence: ConsequenceView
    environment: EnvironmentView | None
    sample: SampleView | None
    run: RunView

    @property
    def passes(self) -> bool:
        """The command would end with 0 on it."""
        return self.verdict.passes


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignmentView:
    """A whole alignment. counts: candidates by verdict, gravest first. is_matrix: whether candidates
    are named by layouts and options. must_match, facts, settings, packages: of the baseline and its recording.
    baseline_code: its module in the pipeline's place, with its calls; empty without one. bounds: those of every tensor
    and metric, in words. seconds: of the whole, label and seconds; empty until it ended. origin: date, revision and
    command of the alignment, as labels and texts.
    """

    config_name: str
    output_dir: str
    recording_dir: str
    exit_code: int
    tone: Tone
    counts: tuple[tuple[VerdictKind, int], ...]
    headline: str
    baseline_layout: str
    baseline_code: str
    baseline_seconds: tuple[tuple[str, float], ...]
    baseline_ledger: tuple[tuple[str, str], ...]
    candidates: tuple[CandidateView, ...]
    is_matrix: bool
    must_match: tuple[tuple[str, str], ...]
    may_differ: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str], ...]
    packages: tuple[tuple[str, str], ...]
    facts: tuple[str, ...]
    notes: tuple[str, ...]
    bounds: str
    seconds: tuple[tuple[str, float], ...]
    total_s: float | None
    origin: tuple[tuple[str, str], ...] = ()
