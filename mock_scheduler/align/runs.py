"""Carrying out an alignment: baseline, candidates one after another, and a verdict for each.

A baseline that fails ends it; a candidate that fails is ``incomparable`` (``unverified`` where it could not show that
it is deterministic), with its own error as the reason, and the next one runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.markup import escape

from mock_scheduler.align.execution import LaunchRun, execute_run, failed_run_error
from mock_scheduler.align.plan import AlignPlan, PlannedRun
from mock_scheduler.compare.finished_run import RunFailure, load_summary
from mock_scheduler.compare.results import AlignmentResult, CandidateResult, RunSummary, compare_runs
from mock_scheduler.compare.selection import EVERYTHING, Selection
from mock_scheduler.compare.verdict import Alignment, Verdict, failed_run
from mock_scheduler.compare.walk import OnKey
from mock_scheduler.config.schema import ToleranceConfig
from mock_scheduler.determinism.settings import is_deterministic_mode
from mock_scheduler.errors import AlignmentError, ExitCode, TraceError

SaveResult = Callable[[AlignmentResult], None]


def run_alignment(
    plan: AlignPlan, *, config_name: str, launch: LaunchRun, save: SaveResult, console: Console
) -> AlignmentResult:
    """Run everything that is planned; ``launch`` starts one run and returns its exit code when it has ended.

    ``save`` keeps the result so far: after the baseline and after every candidate, those that have not run yet being
    ``incomparable``. ``console`` shows which run is going and how long each took. Raises ``AlignmentError`` where the
    baseline fails, with the baseline's own exit code.
    """
    baseline = _execute(plan.baseline, launch=launch, console=console)
    if isinstance(baseline, RunFailure):
        raise failed_run_error("the baseline", plan.baseline, baseline, consequence="no candidate was run")
    candidates = [_not_run_yet(candidate) for candidate in plan.candidates]
    result = AlignmentResult(
        config_name=config_name,
        output_dir=plan.output_dir,
        recording_dir=plan.recording_dir,
        tolerance=plan.tolerance,
        baseline=baseline,
        candidates=tuple(candidates),
    )
    save(result)
    for position, candidate in enumerate(plan.candidates):
        candidates[position] = _judge_candidate(plan, candidate, baseline, launch=launch, console=console)
        result = replace(result, candidates=tuple(candidates))
        save(result)
    return result


def _execute(run: PlannedRun, *, launch: LaunchRun, console: Console) -> RunSummary | RunFailure:
    outcome = execute_run(run, launch=launch, console=console)
    if isinstance(outcome, RunFailure):
        return outcome
    try:
        return load_summary(run.name, run.output_dir, elapsed_s=outcome)
    except AlignmentError as error:
        return RunFailure(exit_code=ExitCode.INCOMPARABLE, message=str(error))


def _judge_candidate(
    plan: AlignPlan, candidate: PlannedRun, baseline: RunSummary, *, launch: LaunchRun, console: Console
) -> CandidateResult:
    outcome = _execute(candidate, launch=launch, console=console)
    if isinstance(outcome, RunFailure):
        is_unverified = outcome.exit_code == ExitCode.UNVERIFIED
        verdict = Verdict.UNVERIFIED if is_unverified else Verdict.INCOMPARABLE
        alignment = failed_run(verdict, f"the run failed (exit code {outcome.exit_code}): {outcome.message}")
    else:
        with console.status(f"{escape(candidate.name)}: comparing metrics and tensors"):
            alignment = judge_runs(
                baseline,
                outcome,
                tolerance=plan.tolerance,
                is_deterministic=all(
                    is_deterministic_mode(run.config.system_envs) for run in (plan.baseline, candidate)
                ),
            )
    return CandidateResult(
        name=candidate.name,
        overrides=candidate.own_overrides,
        layout=candidate.layout,
        log_path=candidate.log_path,
        run=outcome if isinstance(outcome, RunSummary) else None,
        alignment=alignment,
    )


def _not_run_yet(candidate: PlannedRun) -> CandidateResult:
    return CandidateResult(
        name=candidate.name,
        overrides=candidate.own_overrides,
        layout=candidate.layout,
        log_path=candidate.log_path,
        run=None,
        alignment=failed_run(Verdict.INCOMPARABLE, "not run yet: the alignment is still going, or was interrupted"),
    )


def judge_runs(
    baseline: RunSummary,
    candidate: RunSummary,
    *,
    tolerance: ToleranceConfig,
    is_deterministic: bool,
    selection: Selection = EVERYTHING,
    has_metrics: bool = True,
    on_key: OnKey | None = None,
) -> Alignment:
    """The verdict on two finished runs; a difference proves something only where each would repeat itself.

    ``is_deterministic``: whether both ran under ``DETERMINISTIC_MODE=1``. The others are those of ``compare_runs``.
    """
    other_rollouts = _describe_other_rollouts(baseline, candidate)
    if other_rollouts:
        return failed_run(Verdict.INCOMPARABLE, other_rollouts)
    try:
        alignment = compare_runs(
            baseline.output_dir,
            candidate.output_dir,
            tolerance=tolerance,
            selection=selection,
            has_metrics=has_metrics,
            on_key=on_key,
        )
    except (AlignmentError, TraceError) as error:
        return failed_run(Verdict.INCOMPARABLE, str(error))
    if is_deterministic or alignment.verdict is Verdict.IDENTICAL:
        return alignment
    reason = f"without DETERMINISTIC_MODE=1 two equal runs may differ as much: {alignment.reason}"
    return replace(alignment, verdict=Verdict.UNVERIFIED, reason=reason)


def _describe_other_rollouts(baseline: RunSummary, candidate: RunSummary) -> str:
    """Where two runs trained on different batches; empty where every step that both made has the same one."""
    shared = sorted(baseline.batches.keys() & candidate.batches.keys(), key=int)
    different = [step for step in shared if baseline.batches[step] != candidate.batches[step]]
    if not different:
        return ""
    return (
        f"the two runs trained on other rollouts from step {different[0]} on ({len(different)} of {len(shared)} "
        "steps), so nothing in their training can be compared; replay the baseline's recording in the candidate: "
        "rollout_mock.mode=mock and its rollout_mock.dump_dir"
    )
