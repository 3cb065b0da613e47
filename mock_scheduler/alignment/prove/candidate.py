"""One candidate while an alignment goes on: its state, its result for reports, and the runs that localise it.

Contract: a state changes by its own results alone; ``CloserLook`` makes further runs through the store, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mock_scheduler.alignment.localise.localise import MAX_TRACE_BYTES, localise
from mock_scheduler.alignment.localise.runs import full_overrides, guess_bytes
from mock_scheduler.alignment.plan.planned_run import AlignPlan, PlannedRun
from mock_scheduler.alignment.prove.proof_runs import (
    derive_run,
    describe_order_limits,
    has_other_precision,
    is_same_order,
    plan_in_precision,
    plan_with_collectives,
)
from mock_scheduler.alignment.runs.run_store import RunStore
from mock_scheduler.comparison.bounds.bounds import EXACT, Bounds, shrinking_factor
from mock_scheduler.comparison.findings import Finding, OtherClip, OtherStart
from mock_scheduler.comparison.noise.building import measure_noise
from mock_scheduler.comparison.noise.one_kernel import find_kernel_excess
from mock_scheduler.comparison.pairing.ledgers import find_broken_group
from mock_scheduler.comparison.pairing.selection import Selection
from mock_scheduler.comparison.tensors import LedgerComparison, TensorComparison
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.config.instruments import UNIT_ROUNDOFFS, coarser_precision
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import AlignmentError
from mock_scheduler.program import ConfigLoader
from mock_scheduler.run_folder.finished_run import RunSummary
from mock_scheduler.support.run_files import TRACE_FOLDER
from mock_scheduler.trace.begun_calls import load_begun_step
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.start_report import StartReport
from mock_scheduler.verdict.consequence.figures import Consequence
from mock_scheduler.verdict.divergences import Divergence, from_conflict, from_finding, from_tensor
from mock_scheduler.verdict.final_verdict import is_vouched_for, judge, withdraw
from mock_scheduler.verdict.ladder import Evidence, is_settled
from mock_scheduler.verdict.localisation import Localisation
from mock_scheduler.verdict.reasons import NOT_NEEDED, STRONGER_PROOF, NotTried, NotTriedCause, StillOpen
from mock_scheduler.verdict.results import CandidateResult
from mock_scheduler.verdict.verdict import WITHOUT_COMPARISON, EqualInputsFacts, OwnChanges, Verdict, VerdictKind


@dataclass(kw_only=True, slots=True)
class CandidateState:
    """A candidate as planned, its baseline, and all results so far; ``None`` until there is one.

    ``direct``, ``emulated``, ``wide``, ``law`` and the reasons for the missing ones: as in ``Evidence``.
    ``emulated_run``: the reference in its order of sums. ``repeated``: its run with another of the same, out of
    ``further_runs``. ``judged``: the verdict with its proofs. ``start``: what its run started from.
    """

    run: PlannedRun
    baseline: PlannedRun
    summary: RunSummary | None = None
    start: StartReport | None = None
    direct: Verdict | None = None
    emulated_run: PlannedRun | None = None
    emulated: Verdict | None = None
    not_followed: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    not_emulated: NotTried = NOT_NEEDED
    equal_inputs: EqualInputsFacts | None = None
    no_equal_inputs: NotTried = STRONGER_PROOF
    wide: Verdict | None = None
    no_referee: NotTried = STRONGER_PROOF
    law: Divergence | None = None
    repeated: TensorComparison | None = None
    further_runs: set[Path] = field(default_factory=set)
    judged: Verdict | None = None
    localisation: Localisation | None = None
    consequence: Consequence | None = None

    @property
    def must_equal_baseline(self) -> bool:
        """Whether none of its changes may move a bit."""
        return self.run.must_be_exact and self.run.changes.kind == "nothing"

    @property
    def same_order(self) -> tuple[PlannedRun, Verdict] | None:
        """The reference that adds in the candidate's order, with the comparison to it; ``None`` without one."""
        if self.emulated_run is not None and self.emulated is not None:
            return self.emulated_run, self.emulated
        if self.direct is not None and is_same_order(self.baseline, self.run):
            return self.baseline, self.direct
        return None

    @property
    def may_be_vouched_for(self) -> bool:
        """Whether a reference with its bits needs no measured noise where it lies within the bounds of theory.

        They are narrow in float32 alone, and no test of slope or place is behind them. A fault of a key that the
        reference has too would be on both sides.
        """
        run = self.run
        return (
            self.baseline.config.align.proofs.noise == "auto"
            and run.must_equal_reference
            and not run.changes.has_other_execution
            and not has_other_precision(self.baseline, run)
            and UNIT_ROUNDOFFS[self.precision] <= UNIT_ROUNDOFFS["float32"]
        )

    @property
    def is_vouched_for(self) -> bool:
        """Whether its verdict needs no measured noise."""
        return self.may_be_vouched_for and is_vouched_for(self.direct, self.emulated)

    @property
    def precision(self) -> str:
        """The coarser precision of its baseline and its own: whose rounding the two are apart by."""
        return coarser_precision(self.baseline.config.precision, self.run.config.precision)

    @property
    def rounds_first(self) -> bool:
        """Whether the first tensor that differs does so by no more than one kernel rounds."""
        inputs = self.equal_inputs
        return inputs is not None and bool(inputs.judged) and inputs.excess is None

    @property
    def starts_otherwise_rounded(self) -> bool:
        """Whether it starts from weights rounded in another way: nothing further is to be found behind that."""
        evidence = None if self.verdict.first is None else self.verdict.first.evidence
        return isinstance(evidence, Finding) and isinstance(evidence.fact, OtherStart) and bool(evidence.fact.rounded)

    @property
    def has_differed(self) -> bool:
        """Whether it is known not to repeat itself."""
        return self.repeated is not None and any(not item.bit_equal for item in self.repeated.differences)

    @property
    def is_open(self) -> bool:
        """Whether it was compared with the baseline, and more is needed to judge it."""
        return self.direct is not None and not is_settled(self.direct)

    @property
    def verdict(self) -> Verdict:
        """Returns the verdict so far."""
        if self.judged is not None:
            return self.judged
        if self.direct is not None and not self.is_open:
            return self.direct
        missing = StillOpen(missing="run" if self.direct is None else "judgement")
        return Verdict(kind=VerdictKind.INCOMPARABLE, why=missing)

    def judge(self) -> None:
        """Judge it by all results so far."""
        run, direct = self.run, self.direct
        # Nothing was compared: the reason stands, and no proof could change it.
        if direct is None or direct.kind in WITHOUT_COMPARISON:
            return
        judged = judge(
            Evidence(
                direct=direct,
                num_processes=run.config.parallel.world_size,
                changes=self._own_changes,
                is_same_order=is_same_order(self.baseline, run),
                must_be_exact=run.must_be_exact,
                must_equal_reference=run.must_equal_reference,
                may_be_vouched_for=self.may_be_vouched_for,
                rounds_in=self.precision if has_other_precision(self.baseline, run) else "",
                emulated=self.emulated,
                not_followed=self.not_followed,
                assumed=self.assumed,
                not_emulated=self.not_emulated,
                layout=run.layout,
                equal_inputs=self.equal_inputs,
                no_equal_inputs=self.no_equal_inputs,
                wide=self.wide,
                law=self.law,
                no_referee=self.no_referee,
                shrinking=shrinking_factor(self.precision),
            )
        )
        self.judged = withdraw(judged, self.repeated)

    def why_not_emulated(self, baseline: RunSummary) -> NotTried | None:
        """Say why no reference is run in its order of sums; ``None`` where one is."""
        if not self.baseline.config.align.proofs.emulate:
            return NotTried(cause=NotTriedCause.TURNED_OFF, keys=("align.proofs.emulate",))
        if is_same_order(self.baseline, self.run):
            return NotTried(cause=NotTriedCause.SAME_ORDER)
        # The reference has the candidate's keys, so an effect of theirs would be on both sides and prove nothing.
        more = self.run.changes.beside_precision
        if more and not self.run.must_be_exact:
            return NotTried(cause=NotTriedCause.CHANGES_MORE, keys=more)
        problem = describe_order_limits(self.run) or "; ".join(self._find_stated_limits(baseline))
        return NotTried(cause=NotTriedCause.ORDER_UNKNOWN, error=problem) if problem else None

    def _find_stated_limits(self, baseline: RunSummary) -> list[str]:
        """List what finished runs themselves know to keep a reference from following the order: no run is spent."""
        # The reference is the baseline's training in one process, but for keys that the candidate changes besides.
        is_alike = self.baseline.config.parallel.world_size == 1 and not self.run.changes.beside_precision
        own = () if self.summary is None else self.summary.order_limits
        return list(dict.fromkeys((*(baseline.order_limits if is_alike else ()), *own)))

    @property
    def _own_changes(self) -> OwnChanges:
        return OwnChanges(
            keys=(*self.run.changes.layout, *self.run.changes.other),
            entry=self.run.entry if self.run.has_other_code else "",
            versions=tuple(self.run.version_changes),
        )

    def to_result(self) -> CandidateResult:
        """Make the result for reports."""
        run = self.run
        return CandidateResult(
            name=run.name,
            overrides=run.own_overrides,
            layout=run.layout,
            log_path=run.log_path,
            run=self.summary,
            start=self.start,
            verdict=self.verdict,
            entry=self._own_changes.entry,
            module=run.own_module,
            changes=(*run.changes.layout, *run.changes.other),
            options=run.changes.other,
            emulated=self.emulated,
            localisation=self.localisation,
            consequence=self.consequence,
            versions=run.version_changes,
        )


#: Runs with grafts, beside which further tensors have equal inputs.
_NUM_KERNEL_GRAFTS = 2
#: Perturbed runs that show the noise of what only localisation traces.
_NUM_PERTURBATIONS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CloserLook:
    """Localises candidates of one alignment; ``load`` makes configurations of overrides, ``store`` makes the runs."""

    plan: AlignPlan
    load: ConfigLoader
    store: RunStore

    def localise(self, item: CandidateState) -> Localisation | None:
        """Find where a divergence begins, against a reference with the candidate's order of sums where there is one.

        Raises ``AlignmentError`` where a run fails, ``ConfigError`` where one cannot be, ``TraceError`` for its files.
        """
        reference = self.plan.baseline
        first = item.verdict.first
        differs = item.emulated is not None and (
            item.emulated.kind in (VerdictKind.DIVERGED, VerdictKind.SUSPECT)
            or (item.equal_inputs is not None and item.equal_inputs.excess is not None)
        )
        if item.emulated_run is not None and differs:
            reference = item.emulated_run
        is_same = reference is item.emulated_run or is_same_order(reference, item.run)
        bounds = None
        # In another order of sums every bit may differ, and code of its own may round before the fault; so only noise
        # tells a cause from rounding.
        if not is_same or item.rounds_first:
            bounds = self._measure_all_kinds(0 if first is None else first.step, item.precision)
        try:
            found = localise(reference, item.run, first=first, run=self._run_further, bounds=bounds)
        except AlignmentError:
            if not (is_same and item.rounds_first):
                raise
            # Nothing is beyond the noise of so few runs: then the first bit must do.
            found = localise(reference, item.run, first=first, run=self._run_further)
        _note_law(item, found)
        self._compare_repeated(item, found)
        return found

    def find_conflict(self, item: CandidateState) -> None:
        """Find the first tensor of all whose copies differ, where copies of a tensor that every run traces do.

        Raises ``AlignmentError`` where a run fails, ``ConfigError`` where one cannot be, ``TraceError`` for its files.
        """
        assert item.direct is not None
        assert item.direct.tensors is not None
        assert item.summary is not None
        step = item.direct.tensors.candidate_conflicts[0].key.step
        with open_trace(item.summary.output_dir / TRACE_FOLDER) as trace:
            if guess_bytes(item.run, trace, num_ranks=item.run.config.parallel.world_size) > MAX_TRACE_BYTES:
                return
        # The run that localisation makes too.
        name = f"localise-{item.run.name}-full-candidate"
        folder = self._run_further(item.run, full_overrides(item.run, step, None), name) / TRACE_FOLDER
        chosen = Selection(steps=StepRanges.of([step]))
        conflicts = compare_trace_folders(folder, folder, bounds=EXACT, selection=chosen).candidate_conflicts
        item.law = from_conflict(conflicts[0]) if conflicts else None

    def find_broken_group(self, item: CandidateState) -> LedgerComparison | None:
        """Run a failed candidate once more with its collectives, and find where its ranks did not issue the same.

        Raises ``ConfigError`` where there can be no such run.
        """
        run = plan_with_collectives(item.run, load=self.load, root=self.plan.proofs_dir)
        self.store.execute([run])
        begun = load_begun_step(run.output_dir)
        return None if begun is None else find_broken_group(begun)

    def judge_equal_inputs(self, item: CandidateState) -> EqualInputsFacts:
        """Judge the first differing tensors of a candidate, whose inputs are equal, by one kernel's rounding.

        Raises ``AlignmentError`` where a run fails, ``ConfigError`` where one cannot be, ``TraceError`` for its files.
        """
        reference = item.same_order
        assert reference is not None
        run, compared = reference
        differences = () if compared.tensors is None else compared.tensors.differences
        first = next((found for found in differences if not found.bit_equal), None)
        place = localise(
            run,
            item.run,
            first=None if first is None else from_tensor(first),
            run=self._run_further,
            max_grafts=_NUM_KERNEL_GRAFTS,
        )
        _note_law(item, place)
        self._compare_repeated(item, place)
        unit = UNIT_ROUNDOFFS[item.run.config.precision]
        causes = [place.origin, *(cause.tensor for cause in place.causes[1:] if cause.tensor is not None)]
        judged = [cause.difference for cause in causes if cause.difference is not None]
        excesses = [(found, find_kernel_excess(found, unit=unit)) for found in judged]
        first_excess = next(((found, excess) for found, excess in excesses if excess is not None), None)
        law = None if place.law is None else place.law.finding
        is_clip = law is not None and isinstance(law.fact, OtherClip)
        return EqualInputsFacts(
            judged=tuple(found.key for found in judged),
            excess=first_excess,
            broken=law if is_clip and first_excess is None else None,
            is_complete=bool(place.causes) and not place.remaining,
        )

    def _compare_repeated(self, item: CandidateState, found: Localisation) -> None:
        """Compare the candidate's run with a further one, which localisation made to trace more of a step."""
        assert item.summary is not None
        further = found.trace_dirs[1]
        # The same further run serves every question, and one that agrees takes no earlier difference back.
        if further in item.further_runs or item.has_differed:
            return
        item.further_runs.add(further)
        item.repeated = compare_trace_folders(
            item.summary.output_dir / TRACE_FOLDER,
            further,
            bounds=EXACT,
            selection=Selection(steps=StepRanges.of([found.step])),
        )

    def _measure_all_kinds(self, step: int, precision: str) -> Bounds:
        """Measure the noise of every tensor of one step, traced or not in ordinary runs, in a precision."""
        # Anew, since ``noise.json`` knows only what ordinary runs trace.
        planned = plan_in_precision(self.plan.baseline, precision, load=self.load, root=self.plan.proofs_dir)
        overrides = full_overrides(planned, step, None)
        name = f"localise-step-{step}" if planned is self.plan.baseline else f"localise-{planned.name}-step-{step}"
        whole = self._run_further(planned, overrides, name)
        folders = [
            self._run_further(planned, [*overrides, f"perturbation.seed={seed}"], f"{name}-noise-{seed}")
            for seed in range(_NUM_PERTURBATIONS)
        ]
        return measure_noise(whole, folders, seeds=range(len(folders)))

    def _run_further(self, planned: PlannedRun, overrides: Sequence[str], name: str) -> Path:
        """Make a run for localisation; the same one is made once."""
        run = derive_run(planned, name, overrides, load=self.load, root=self.plan.proofs_dir)
        # Localisation may ask for one run more than once: candidate and overrides name it.
        return self.store.execute_once(run, (planned.name, *overrides))


def _note_law(item: CandidateState, found: Localisation) -> None:
    """Keep where whole tensors of the candidate's run contradict each other."""
    law = found.law
    if law is not None and law.conflict is not None:
        residual = None if law.difference is None else law.difference.residual
        item.law = from_conflict(law.conflict, residual)
    elif law is not None and law.finding is not None:
        item.law = from_finding(law.finding)
