"""Carrying out an alignment: baseline, candidates, and the proofs of each, from the strongest that its change allows.

The runs of a stage are started together, so that they can share processes: the baseline; all candidates; then what the
candidates that are not bit-equal need (perturbed baselines, references in their order of sums); then the referee's runs
of those that are still suspect or diverged; then, one candidate after another, what localises a divergence.

A baseline that fails ends it; a candidate that fails is ``incomparable`` (``unverified`` where it could not show that
it is deterministic), with its own error as the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape

from mock_scheduler.align.plan.plan import ConfigLoader
from mock_scheduler.align.plan.planned_run import AlignPlan, PlannedRun
from mock_scheduler.align.prove.candidate_state import CandidateState
from mock_scheduler.align.prove.closer_look import CloserLook
from mock_scheduler.align.prove.proof_runs import (
    describe_order_limits,
    is_same_order,
    plan_emulated,
    plan_perturbed,
    plan_wide,
)
from mock_scheduler.align.runs.execution import Outcome, failed_run_error
from mock_scheduler.align.runs.run_store import RunStore
from mock_scheduler.compare.bounds.bounds import EXACT, Bounds, StatedBounds, WideBounds
from mock_scheduler.compare.bounds.measured import NoiseBounds
from mock_scheduler.compare.noise.building import measure_noise
from mock_scheduler.compare.noise.files import NOISE_FILE, save_noise
from mock_scheduler.compare.noise.theory import build_theory_bounds
from mock_scheduler.determinism.settings import is_deterministic_mode
from mock_scheduler.errors import AlignmentError, ConfigError, ExitCode, TraceError
from mock_scheduler.run_folder.finished_run import RunFailure, RunSummary
from mock_scheduler.support.run_files import TRACE_FOLDER
from mock_scheduler.verdict.consequence.consequence import find_consequence
from mock_scheduler.verdict.results import AlignmentResult
from mock_scheduler.verdict.runs import judge_runs
from mock_scheduler.verdict.verdict import Verdict, VerdictKind, failed_run

SaveResult = Callable[[AlignmentResult], None]


@dataclass(kw_only=True)
class AlignmentRunner:
    """One alignment. ``store`` makes its runs; ``save`` keeps the result so far, after every stage.

    ``load`` makes a configuration out of overrides; ``console`` shows what is compared.
    """

    plan: AlignPlan
    config_name: str
    load: ConfigLoader
    store: RunStore
    save: SaveResult
    console: Console
    _candidates: list[CandidateState] = field(default_factory=list)
    _noise: NoiseBounds | None = None

    def run(self) -> AlignmentResult:
        """Every stage. Raises ``AlignmentError`` where the baseline fails, with the baseline's own exit code."""
        planned = self.plan.baseline
        with self.store.timed("baseline"):
            outcome = self.store.execute([planned])[planned.name]
        baseline = self.store.summarise(planned, outcome)
        if isinstance(baseline, RunFailure):
            raise failed_run_error("the baseline", planned, baseline, consequence="no candidate was run")
        self._candidates = [CandidateState(run=run, baseline=planned) for run in self.plan.candidates]
        self._save(baseline)
        for stage in (self._run_candidates, self._prove, self._call_referee, self._look_closer):
            stage(baseline)
            self._save(baseline)
        return self._save(baseline, has_ended=True)

    def _run_candidates(self, baseline: RunSummary) -> None:
        """Run all, and find out of each as soon as it has ended whether it is bit-equal to the baseline."""
        states = {item.run.name: item for item in self._candidates}

        def take(run: PlannedRun, outcome: Outcome) -> None:
            self._take(states[run.name], self.store.summarise(run, outcome), baseline)
            self._save(baseline)

        with self.store.timed("candidates"):
            self.store.execute([item.run for item in self._candidates], take)

    def _take(self, item: CandidateState, summary: RunSummary | RunFailure, baseline: RunSummary) -> None:
        if not isinstance(summary, RunFailure):
            item.summary = summary
            item.direct = self._compare(baseline, item, EXACT)
            return
        verdict = VerdictKind.UNVERIFIED if summary.exit_code == ExitCode.UNVERIFIED else VerdictKind.INCOMPARABLE
        how = f"the run failed (exit code {summary.exit_code}): " if summary.exit_code else ""
        item.direct = failed_run(verdict, f"{how}{summary.message}")

    def _compare(self, baseline: RunSummary, item: CandidateState, bounds: Bounds) -> Verdict:
        assert item.summary is not None
        runs = (self.plan.baseline, item.run)
        with self.store.timed("comparison"), self._showing(item.run, "comparing"):
            return judge_runs(
                baseline,
                item.summary,
                bounds=bounds,
                is_deterministic=all(is_deterministic_mode(run.config.system_envs) for run in runs),
            )

    def _prove(self, baseline: RunSummary) -> None:
        """Run what the candidates need that are not settled, and judge all."""
        noisy = [item for item in self._candidates if item.is_open and not item.must_equal_baseline]
        outcomes = self._run_proofs(noisy, baseline) if noisy else {}
        for item in noisy:
            item.direct = self._compare(baseline, item, self._bounds_of(baseline, item))
            if item.emulated_run is not None:
                self._compare_with_emulated(baseline, item, outcomes[item.emulated_run.name])
        for item in self._candidates:
            item.judge()

    def _run_proofs(self, noisy: Sequence[CandidateState], baseline: RunSummary) -> dict[str, Outcome]:
        """The perturbed baselines, which show the noise, and the references of these candidates."""
        proofs, root = self.plan.baseline.config.align.proofs, self.plan.proofs_dir
        perturbed = [
            plan_perturbed(self.plan.baseline, seed, load=self.load, root=root)
            for seed in range(proofs.num_perturbations)
        ]
        references = self._plan_references(noisy)
        outcomes = self.store.execute([*perturbed, *references])
        self.store.count("noise", sum(_seconds(outcomes[run.name]) for run in perturbed))
        self.store.count("emulation", sum(_seconds(outcomes[run.name]) for run in references))
        self._noise = self._measure(baseline, perturbed, outcomes)
        return outcomes

    def _plan_references(self, noisy: Sequence[CandidateState]) -> list[PlannedRun]:
        """One run for all candidates that need the same reference."""
        by_config: dict[str, PlannedRun] = {}
        for item in noisy:
            item.emulation_note = _why_not_emulated(item)
            if item.emulation_note:
                continue
            try:
                run = plan_emulated(item.run, self.plan.baseline, load=self.load, root=self.plan.proofs_dir)
            except ConfigError as error:
                item.emulation_note = f"its order of sums cannot be followed: {error}"
                continue
            values = run.config.model_dump(mode="json", exclude={"output_dir", "exp_name", "align"})
            item.emulated_run = by_config.setdefault(str(values), run)
        return list(by_config.values())

    def _measure(
        self, baseline: RunSummary, perturbed: Sequence[PlannedRun], outcomes: dict[str, Outcome]
    ) -> NoiseBounds | None:
        """The noise that these runs show; ``None`` where there are none."""
        usable = [run for run in perturbed if not isinstance(outcomes[run.name], RunFailure)]
        for run in perturbed:
            if run not in usable:
                self._warn(f"{run.name} failed; its output is in {run.log_path}")
        if not usable:
            return None
        with self.store.timed("noise"), self.console.status("measuring the noise of every tensor"):
            noise = measure_noise(
                baseline.output_dir,
                [run.output_dir for run in usable],
                seeds=[run.config.perturbation.seed or 0 for run in usable],
            )
            save_noise(noise, self.plan.output_dir / NOISE_FILE)
        return noise

    def _bounds_of(self, baseline: RunSummary, item: CandidateState) -> Bounds:
        """What a candidate is held to: what is stated, over what was measured, or else over theory."""
        assert item.summary is not None
        otherwise: Bounds | None = self._noise
        if otherwise is None:
            otherwise = build_theory_bounds(baseline.output_dir / TRACE_FOLDER, item.summary.output_dir / TRACE_FOLDER)
        return StatedBounds(tolerance=self.plan.tolerance, otherwise=otherwise)

    def _compare_with_emulated(self, baseline: RunSummary, item: CandidateState, outcome: Outcome) -> None:
        """To the last bit; what may round elsewhere too by its bounds, from which the layout's rounding is gone."""
        assert item.emulated_run is not None
        assert item.summary is not None
        reference = self.store.summarise(item.emulated_run, outcome)
        if isinstance(reference, RunFailure):
            item.emulation_note = f"the run in its order of sums failed: {reference.message}"
            return
        with self.store.timed("emulation"), self._showing(item.run, "comparing in its own order of sums"):
            bounds = EXACT if item.run.must_be_exact else self._bounds_of(baseline, item)
            item.emulated = judge_runs(reference, item.summary, bounds=bounds, is_deterministic=True)

    def _call_referee(self, baseline: RunSummary) -> None:
        """Run baseline and candidates that need it again in float64, and judge these anew."""
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
                item.wide_note = f"it cannot be run in float64: {error}"
                item.judge()
            return
        with self.store.timed("referee"):
            outcomes = self.store.execute(runs)
        wide_baseline = self.store.summarise(runs[0], outcomes[runs[0].name])
        for item, run in zip(wanted, runs[1:], strict=True):
            wide = self.store.summarise(run, outcomes[run.name])
            if isinstance(wide_baseline, RunFailure) or isinstance(wide, RunFailure):
                failure = wide if isinstance(wide, RunFailure) else wide_baseline
                item.wide_note = (
                    f"a run in float64 failed: {failure.message if isinstance(failure, RunFailure) else ''}"
                )
            else:
                bounds = WideBounds(inner=self._bounds_of(baseline, item), precision=item.run.config.precision)
                with self.store.timed("referee"), self._showing(run, "comparing"):
                    item.wide = judge_runs(wide_baseline, wide, bounds=bounds, is_deterministic=True)
            item.judge()

    def _needs_referee(self, item: CandidateState) -> bool:
        if item.judgement is None or item.summary is None:
            return False
        referee = self.plan.baseline.config.align.proofs.referee
        if item.run.config.precision == "float64":
            item.wide_note = "it is float64 already"
        elif referee == "never":
            item.wide_note = "align.proofs.referee is never"
        elif referee == "always":
            return item.alignment.verdict is not VerdictKind.IDENTICAL
        else:
            is_refuted = any(proof.outcome == "refuted" for proof in item.judgement.proofs if proof.name != "noise")
            return item.alignment.verdict in (VerdictKind.SUSPECT, VerdictKind.DIVERGED) and not is_refuted
        item.judge()
        return False

    def _look_closer(self, baseline: RunSummary) -> None:
        """What a difference does to training, and where a divergence begins."""
        proofs = self.plan.baseline.config.align.proofs
        closer = CloserLook(plan=self.plan, load=self.load, store=self.store)
        for item in self._candidates:
            if item.judgement is None or item.summary is None or item.alignment.verdict is VerdictKind.IDENTICAL:
                continue
            if proofs.consequence:
                with self.store.timed("comparison"), self._showing(item.run, "what it does to training"):
                    try:
                        item.consequence = find_consequence(baseline.output_dir, item.summary.output_dir)
                    except (AlignmentError, TraceError) as error:
                        self._warn(f"{item.run.name}: what it does to training is not known: {error}")
            if proofs.localise and item.alignment.verdict is VerdictKind.DIVERGED:
                with self.store.timed("localisation"):
                    try:
                        item.localisation = closer.localise(item)
                    except (AlignmentError, ConfigError, TraceError) as error:
                        self._warn(f"{item.run.name} is not localised: {error}")
            self._save(baseline)

    def _showing(self, run: PlannedRun, what: str) -> AbstractContextManager[object]:
        return self.console.status(f"{escape(run.name)}: {what}")

    def _warn(self, text: str) -> None:
        self.console.print(f"  [yellow]{escape(text)}[/yellow]", highlight=False)

    def _save(self, baseline: RunSummary, *, has_ended: bool = False) -> AlignmentResult:
        result = AlignmentResult(
            config_name=self.config_name,
            output_dir=self.plan.output_dir,
            recording_dir=self.plan.recording_dir,
            bounds=StatedBounds(tolerance=self.plan.tolerance, otherwise=self._noise or EXACT),
            baseline=baseline,
            candidates=tuple(item.to_result() for item in self._candidates),
            times=self.store.times() if has_ended else None,
        )
        self.save(result)
        return result


def _why_not_emulated(item: CandidateState) -> str:
    """Why no reference is run in a candidate's order of sums; empty where one is."""
    if not item.baseline.config.align.proofs.emulate:
        return "align.proofs.emulate is false"
    if is_same_order(item.baseline, item.run):
        return "it adds in the baseline's order"
    if item.run.changes.other and not item.run.must_be_exact:
        return f"it changes more than its layout ({', '.join(item.run.changes.other)}), which may round"
    problem = describe_order_limits(item.run.config)
    return f"its order of sums cannot be followed: {problem}" if problem else ""


def _seconds(outcome: Outcome) -> float:
    return 0.0 if isinstance(outcome, RunFailure) else outcome
