"""Carries an alignment out: baseline, candidates, and the proofs of each, from the strongest possible one.

The runs of a stage start together, several at a time where the user wants that: the baseline; all candidates; a further
run of each candidate whose ranks failed, with their collectives; then references in the order of sums of
candidates without equal bits; then perturbed baselines, where such a reference does not prove a candidate, or does not
count as one by theory; then the referee's runs for suspect and diverged ones; then,
one candidate after another, the runs to localise a divergence.

A failed baseline ends it; a failed candidate is ``incomparable`` (``unverified`` where it could not show its
determinism), with its own error as the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.text import Text

from mock_scheduler.alignment.plan.planned_run import AlignPlan, PlannedRun
from mock_scheduler.alignment.prove.candidate import CandidateState, CloserLook
from mock_scheduler.alignment.prove.proof_runs import (
    is_one_run,
    plan_emulated,
    plan_in_precision,
    plan_perturbed,
    plan_wide,
)
from mock_scheduler.alignment.runs.execution import Outcome, failed_run_error
from mock_scheduler.alignment.runs.run_store import Purpose, RunStore
from mock_scheduler.comparison.bounds.bounds import EXACT, Bounds, OtherCodeBounds, StatedBounds, WideBounds
from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.noise.building import measure_noise
from mock_scheduler.comparison.noise.files import save_noise
from mock_scheduler.comparison.noise.theory import build_theory_bounds
from mock_scheduler.comparison.pairing.selection import Selection
from mock_scheduler.determinism.settings import is_deterministic_mode
from mock_scheduler.errors import AlignmentError, ConfigError, ExitCode, TraceError
from mock_scheduler.program import ConfigLoader
from mock_scheduler.run_folder.finished_run import RunFailure, RunSummary
from mock_scheduler.support.run_files import NOISE_FILE, TRACE_FOLDER
from mock_scheduler.support.text import on_one_line, printable_message
from mock_scheduler.trace.replicas import ReplicaConflict
from mock_scheduler.trace.start_report import load_start
from mock_scheduler.verdict.compare_runs import judge_runs
from mock_scheduler.verdict.consequence.consequence import find_consequence
from mock_scheduler.verdict.final_verdict import breaks_law
from mock_scheduler.verdict.reasons import NotTried, NotTriedCause, RunFailed
from mock_scheduler.verdict.results import AlignmentResult
from mock_scheduler.verdict.verdict import WITHOUT_COMPARISON, EqualInputsFacts, Verdict, VerdictKind

SaveResult = Callable[[AlignmentResult], None]


@dataclass(kw_only=True)
class AlignmentRunner:
    """One alignment. ``store`` makes its runs; ``save`` keeps the result so far, after every stage.

    ``load`` makes a configuration out of overrides; ``console`` shows the progress.
    """

    plan: AlignPlan
    config_name: str
    load: ConfigLoader
    store: RunStore
    save: SaveResult
    console: Console
    _candidates: list[CandidateState] = field(default_factory=list)
    _noise: dict[str, NoiseBounds] = field(default_factory=dict)
    _saved: AlignmentResult | None = None

    def run(self) -> AlignmentResult:
        """Go through every stage; raises ``AlignmentError`` with the exit code of a failed baseline."""
        planned = self.plan.baseline
        with self.store.timed("baseline"):
            outcome = self.store.execute([planned])[planned.name]
        baseline = self.store.summarise(planned, outcome)
        if isinstance(baseline, RunFailure):
            raise failed_run_error("the baseline", planned, baseline, consequence="no candidate was run")
        self._candidates = [CandidateState(run=run, baseline=planned) for run in self.plan.candidates]
        self._save(baseline)
        # In this order, since each is dearer than the one before and needed by fewer candidates.
        for stage in (
            self._run_candidates,
            self._explain_failures,
            self._prove,
            self._judge_equal_inputs,
            self._call_referee,
            self._look_closer,
        ):
            stage(baseline)
            self._save(baseline)
        return self._save(baseline, has_ended=True)

    def _run_candidates(self, baseline: RunSummary) -> None:
        """Run all, and find out of each as soon as it has ended whether it is bit-equal to the baseline."""
        states = {item.run.name: item for item in self._candidates}

        def take(run: PlannedRun, outcome: Outcome) -> None:
            # Taken and saved at once: who watches ``align.json`` sees each candidate when it ends.
            self._take(states[run.name], self.store.summarise(run, outcome), baseline)
            self._save(baseline)

        with self.store.timed("candidates"):
            self.store.execute([item.run for item in self._candidates], take)

    def _take(self, item: CandidateState, summary: RunSummary | RunFailure, baseline: RunSummary) -> None:
        if not isinstance(summary, RunFailure):
            item.summary = summary
            try:
                item.start = load_start(summary.output_dir)
            except TraceError as error:
                self._warn(f"{item.run.name}: what it started from is not known: {error}")
            item.direct = self._compare_first(baseline, item)
            return
        kind = VerdictKind.UNVERIFIED if summary.exit_code == ExitCode.UNVERIFIED else VerdictKind.INCOMPARABLE
        item.direct = Verdict(kind=kind, why=RunFailed(exit_code=summary.exit_code, error=summary.message))

    def _explain_failures(self, baseline: RunSummary) -> None:
        """Find out whether the ranks of a failed candidate did not issue the same collectives."""
        closer = CloserLook(plan=self.plan, load=self.load, store=self.store)
        for item in self._candidates:
            direct = item.direct
            # An error of ours says what is wrong; what ranks do to each other ends them with other codes.
            if direct is None or not isinstance(direct.why, RunFailed) or 0 <= direct.why.exit_code <= ExitCode.USAGE:
                continue
            if item.run.config.parallel.world_size == 1:
                continue
            with self.store.timed("localisation"):
                try:
                    broken = closer.find_broken_group(item)
                except ConfigError as error:
                    self._warn(f"{item.run.name}: its collectives cannot be listed: {on_one_line(error)}")
                    continue
            item.direct = replace(direct, why=replace(direct.why, collectives=broken))

    def _compare(self, baseline: RunSummary, item: CandidateState, bounds: Bounds) -> Verdict:
        assert item.summary is not None
        runs = (self.plan.baseline, item.run)
        with self.store.timed("comparison"), self._showing(item.run, "comparing"):
            return judge_runs(
                baseline,
                item.summary,
                bounds=bounds,
                is_deterministic=all(is_deterministic_mode(run.config.system_envs) for run in runs),
                selection=Selection(has_other_calls=item.run.changes.has_other_calls),
            )

    def _compare_first(self, baseline: RunSummary, item: CandidateState) -> Verdict:
        """Compare to the last bit, or by theory where that is what a reference in another order will be held to."""
        if item.may_be_vouched_for and item.why_not_emulated(baseline) is None:
            with suppress(TraceError):  # a damaged file is a reason of the comparison below
                by_theory = self._compare(baseline, item, self._bounds_of(baseline, item))
                if by_theory.kind is not VerdictKind.IDENTICAL:
                    return by_theory
        # Equal bits settle it, and no noise has to be measured for it.
        return self._compare(baseline, item, EXACT)

    def _prove(self, baseline: RunSummary) -> None:
        """Make the further runs of candidates without a settled verdict, and judge all."""
        # Where no bit may move, nothing excuses a difference, so that no run could help.
        noisy = [item for item in self._candidates if item.is_open and not item.must_equal_baseline]
        references = self._plan_references(noisy, baseline)
        outcomes = self._run_proofs("emulation", references)
        emulated = {run.name: self.store.summarise(run, outcomes[run.name]) for run in references}
        for item in noisy:
            if item.emulated_run is not None and item.may_be_vouched_for:
                self._compare_with_emulated(baseline, item, emulated[item.emulated_run.name])
        self._measure_noise([item for item in noisy if not item.is_vouched_for])
        for item in noisy:
            # Noise that another candidate needed is there for all. Without it the bounds are still those of theory.
            has_theory = item.direct is not None and isinstance(item.direct.bounds, StatedBounds)
            if item.precision in self._noise or not has_theory:
                item.direct = self._compare(baseline, item, self._bounds_of(baseline, item))
            if item.emulated_run is not None and item.emulated is None:
                self._compare_with_emulated(baseline, item, emulated[item.emulated_run.name])
        for item in self._candidates:
            item.judge()

    def _run_proofs(self, purpose: Purpose, runs: Sequence[PlannedRun]) -> dict[str, Outcome]:
        with self.store.timed(purpose):
            return self.store.execute(runs)

    def _measure_noise(self, noisy: Sequence[CandidateState]) -> None:
        """Make the perturbed baselines of every precision of these candidates, and measure the noise."""
        groups = [self._plan_noise(precision) for precision in dict.fromkeys(item.precision for item in noisy)]
        measured = [run for group in groups for run in group if run is not self.plan.baseline]
        outcomes = self._run_proofs("noise", measured)
        for unmoved, *perturbed in groups:
            self._measure(unmoved, perturbed, outcomes)

    def _plan_noise(self, precision: str) -> list[PlannedRun]:
        """Plan the baseline in a precision, and its perturbed runs: its noise is the rounding of this precision."""
        root = self.plan.proofs_dir
        try:
            unmoved = plan_in_precision(self.plan.baseline, precision, load=self.load, root=root)
        except ConfigError as error:
            self._warn(f"the noise in {precision} cannot be measured: {on_one_line(error)}")
            return [self.plan.baseline]
        seeds = range(self.plan.baseline.config.align.proofs.num_perturbations)
        return [unmoved, *(plan_perturbed(unmoved, seed, load=self.load, root=root) for seed in seeds)]

    def _plan_references(self, noisy: Sequence[CandidateState], baseline: RunSummary) -> list[PlannedRun]:
        """Plan one run for all candidates with the same reference."""
        by_config: dict[str, PlannedRun] = {}
        for item in noisy:
            why_not = item.why_not_emulated(baseline)
            if why_not is not None:
                item.not_emulated = why_not
                continue
            try:
                run = plan_emulated(item.run, self.plan.baseline, load=self.load, root=self.plan.proofs_dir)
            except ConfigError as error:
                item.not_emulated = NotTried(cause=NotTriedCause.ORDER_UNKNOWN, error=on_one_line(error))
                continue
            # Names and folders apart, candidates with one layout have one reference.
            values = run.config.model_dump(mode="json", exclude={"output_dir", "exp_name", "align"})
            item.emulated_run = by_config.setdefault(str(values), run)
        return list(by_config.values())

    def _measure(self, unmoved: PlannedRun, perturbed: Sequence[PlannedRun], outcomes: dict[str, Outcome]) -> None:
        """Measure the noise of the perturbed runs of one precision, where there are any."""
        made = [run for run in (unmoved, *perturbed) if run is not self.plan.baseline]
        failed = [run for run in made if isinstance(outcomes[run.name], RunFailure)]
        for run in failed:
            self._warn(f"{run.name} failed; its output is in {run.log_path}")
        usable = [run for run in perturbed if run not in failed]
        if not usable or unmoved in failed:
            return  # bounds of theory stand in
        with self.store.timed("noise"), self.console.status("measuring the noise of every tensor"):
            noise = measure_noise(
                unmoved.output_dir,
                [run.output_dir for run in usable],
                seeds=[run.config.perturbation.seed or 0 for run in usable],
            )
            name = NOISE_FILE if unmoved is self.plan.baseline else f"{unmoved.name}-{NOISE_FILE}"
            save_noise(noise, self.plan.output_dir / name)
        self._noise[unmoved.config.precision] = noise

    def _bounds_of(self, baseline: RunSummary, item: CandidateState) -> Bounds:
        """Choose the bounds of a candidate: stated ones over measured ones, or else over theory."""
        assert item.summary is not None
        otherwise: Bounds | None = self._noise.get(item.precision)
        if otherwise is None:
            otherwise = build_theory_bounds(baseline.output_dir / TRACE_FOLDER, item.summary.output_dir / TRACE_FOLDER)
        if item.run.has_other_code or item.run.version_changes:
            otherwise = OtherCodeBounds(inner=otherwise)
        return StatedBounds(tolerance=self.plan.tolerance, otherwise=otherwise)

    def _compare_with_emulated(
        self, baseline: RunSummary, item: CandidateState, reference: RunSummary | RunFailure
    ) -> None:
        """Compare with the reference to the last bit, or by bounds where the candidate may round elsewhere too."""
        assert item.summary is not None
        if isinstance(reference, RunFailure):
            item.not_emulated = NotTried(cause=NotTriedCause.RUN_FAILED, error=reference.message)
            return
        item.not_followed, item.assumed = reference.not_followed, reference.assumed
        with self.store.timed("emulation"), self._showing(item.run, "comparing in its own order of sums"):
            # In the candidate's own order of sums only other code or keys may still round.
            bounds = EXACT if item.run.must_equal_reference else self._bounds_of(baseline, item)
            # Only candidates that the direct comparison found deterministic come here.
            item.emulated = judge_runs(reference, item.summary, bounds=bounds, is_deterministic=True)

    def _judge_equal_inputs(self, baseline: RunSummary) -> None:
        """Judge what a candidate with more than another layout makes of equal inputs."""
        closer = CloserLook(plan=self.plan, load=self.load, store=self.store)
        for item in self._candidates:
            if self._needs_place(item):
                with self.store.timed("localisation"):
                    try:
                        closer.find_conflict(item)
                    except (AlignmentError, ConfigError, TraceError) as error:
                        self._warn(f"{item.run.name}: where its copies first differ is not known: {error}")
                item.judge()
            if not self._needs_equal_inputs(item):
                continue
            with self.store.timed("localisation"):
                try:
                    item.equal_inputs = closer.judge_equal_inputs(item)
                except (AlignmentError, ConfigError, TraceError) as error:
                    item.equal_inputs = EqualInputsFacts(error=on_one_line(printable_message(str(error))))
            item.judge()

    def _needs_place(self, item: CandidateState) -> bool:
        """Whether copies differ in what every run traces, and no localisation will show where they first do."""
        proofs, replicas = self.plan.baseline.config.align.proofs, item.verdict.proof("replicas")
        if proofs.localise or not proofs.equal_inputs or item.summary is None:
            return False
        return replicas is not None and isinstance(replicas.facts, ReplicaConflict)

    def _needs_equal_inputs(self, item: CandidateState) -> bool:
        if item.judged is None or item.summary is None or item.run.must_be_exact:
            return False
        reference = item.same_order
        if reference is None:
            item.no_equal_inputs = item.not_emulated
        elif not self.plan.baseline.config.align.proofs.equal_inputs:
            item.no_equal_inputs = NotTried(cause=NotTriedCause.TURNED_OFF, keys=("align.proofs.equal_inputs",))
        else:
            replicas = item.judged.proof("replicas")
            emulation = item.judged.proof("emulation")
            is_refuted = any(proof is not None and proof.outcome == "refuted" for proof in (replicas, emulation))
            return not is_refuted and reference[1].kind not in (*WITHOUT_COMPARISON, VerdictKind.IDENTICAL)
        item.judge()
        return False

    def _call_referee(self, baseline: RunSummary) -> None:
        """Run the baseline and open candidates again in float64, and judge them anew."""
        wanted = [item for item in self._candidates if self._needs_referee(item)]
        if not wanted:
            return
        try:
            runs = [
                plan_wide(run, load=self.load, root=self.plan.proofs_dir)
                for run in (self.plan.baseline, *(item.run for item in wanted))
            ]
        except ConfigError as error:
            for item in wanted:
                item.no_referee = NotTried(cause=NotTriedCause.CANNOT_RUN, error=on_one_line(error))
                item.judge()
            return
        for item, run in list(zip(wanted, runs[1:], strict=True)):
            # A candidate of another precision alone is the baseline itself there, which acquits nobody.
            if is_one_run(runs[0], run):
                item.no_referee = NotTried(cause=NotTriedCause.ONE_RUN)
                item.judge()
                wanted.remove(item)
                runs.remove(run)
        if not wanted:
            return
        with self.store.timed("referee"):
            outcomes = self.store.execute(runs)
        wide_baseline = self.store.summarise(runs[0], outcomes[runs[0].name])
        for item, run in zip(wanted, runs[1:], strict=True):
            wide = self.store.summarise(run, outcomes[run.name])
            if isinstance(wide, RunFailure):
                item.no_referee = NotTried(cause=NotTriedCause.RUN_FAILED, error=wide.message)
            elif isinstance(wide_baseline, RunFailure):
                item.no_referee = NotTried(cause=NotTriedCause.RUN_FAILED, error=wide_baseline.message)
            else:
                # The bounds of this precision, shrunk: rounding shrinks in float64, and a wrong computation does not.
                bounds = WideBounds(inner=self._bounds_of(baseline, item), precision=item.precision)
                with self.store.timed("referee"), self._showing(run, "comparing"):
                    item.wide = judge_runs(
                        wide_baseline,
                        wide,
                        bounds=bounds,
                        is_deterministic=True,
                        selection=Selection(has_other_calls=item.run.changes.has_other_calls),
                    )
            item.judge()

    def _needs_referee(self, item: CandidateState) -> bool:
        if item.judged is None or item.summary is None or breaks_law(item.judged):
            return False
        referee = self.plan.baseline.config.align.proofs.referee
        if item.precision == "float64":
            item.no_referee = NotTried(cause=NotTriedCause.FLOAT64_ALREADY)
        elif referee == "never":
            item.no_referee = NotTried(cause=NotTriedCause.TURNED_OFF, keys=("align.proofs.referee",))
        elif referee == "always":
            return item.verdict.kind is not VerdictKind.IDENTICAL
        else:
            # A stronger proof stands whatever float64 says; noise is the one that it may overrule.
            is_refuted = any(proof.outcome == "refuted" for proof in item.judged.proofs if proof.name != "noise")
            return item.verdict.kind in (VerdictKind.SUSPECT, VerdictKind.DIVERGED) and not is_refuted
        item.judge()
        return False

    def _look_closer(self, baseline: RunSummary) -> None:
        """Find the effect of each difference on the training, and the beginning of each divergence."""
        proofs = self.plan.baseline.config.align.proofs
        closer = CloserLook(plan=self.plan, load=self.load, store=self.store)
        for item in self._candidates:
            if item.judged is None or item.summary is None or item.verdict.kind is VerdictKind.IDENTICAL:
                continue
            if proofs.consequence:
                with self.store.timed("comparison"), self._showing(item.run, "measuring its effect on training"):
                    # Effect and place explain a verdict and do not make it: where they fail, a warning is enough.
                    try:
                        item.consequence = find_consequence(
                            baseline.output_dir,
                            item.summary.output_dir,
                            load_clip_rule=item.run.program.load_clip_rule,
                        )
                    except (AlignmentError, TraceError) as error:
                        self._warn(f"{item.run.name}: its effect on training is not known: {error}")
            if proofs.localise and item.verdict.kind is VerdictKind.DIVERGED and not item.starts_otherwise_rounded:
                with self.store.timed("localisation"):
                    try:
                        item.localisation = closer.localise(item)
                        # Its second run may show that it does not repeat itself.
                        item.judge()
                    except (AlignmentError, ConfigError, TraceError) as error:
                        self._warn(f"{item.run.name} is not localised: {error}")
                self._save(baseline)

    def _showing(self, run: PlannedRun, what: str) -> AbstractContextManager[object]:
        return self.console.status(Text(f"{run.name}: {what}"))

    @property
    def _own_noise(self) -> NoiseBounds | None:
        """Returns the noise in the baseline's precision; without it that of another one."""
        return self._noise.get(self.plan.baseline.config.precision) or next(iter(self._noise.values()), None)

    @property
    def _theory(self) -> Bounds | None:
        """Returns the bounds of theory of the first candidate that was compared by them."""
        bounds = (item.verdict.bounds for item in self._candidates)
        return next((item.otherwise for item in bounds if isinstance(item, StatedBounds)), None)

    def _warn(self, text: str) -> None:
        for line in printable_message(f"  {text}").split("\n"):
            self.console.print(Text(line, style="yellow"))

    def _save(self, baseline: RunSummary, *, has_ended: bool = False) -> AlignmentResult:
        result = AlignmentResult(
            config_name=self.config_name,
            output_dir=self.plan.output_dir,
            recording_dir=self.plan.recording_dir,
            bounds=StatedBounds(tolerance=self.plan.tolerance, otherwise=self._own_noise or self._theory or EXACT),
            baseline=baseline,
            module=self.plan.baseline.own_module,
            candidates=tuple(item.to_result() for item in self._candidates),
            times=self.store.times() if has_ended else None,
        )
        # Many stages find nothing to do, and the file grows with the number of candidates.
        if result != self._saved:
            self.save(result)
            self._saved = result
        return result
