"""Carrying out an alignment: baseline, candidates one after another, and a verdict for each.

A baseline that fails ends it; a candidate that fails is ``incomparable`` (``unverified`` where it could not show that
it is deterministic), with its own error as the reason, and the next one runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from mock_scheduler.align.plan import AlignPlan, PlannedRun
from mock_scheduler.compare.results import AlignmentResult, CandidateResult, RunSummary, compare_runs
from mock_scheduler.compare.verdict import Alignment, Verdict, failed_run
from mock_scheduler.config.schema import ToleranceConfig
from mock_scheduler.determinism.settings import is_deterministic_mode
from mock_scheduler.errors import AlignmentError, ExitCode, TraceError

LaunchRun = Callable[[PlannedRun], int]
SaveResult = Callable[[AlignmentResult], None]

_NUM_LOG_LINES = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """How a run failed: its own error in words, and its exit code."""

    exit_code: int
    message: str


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
        raise _baseline_error(plan, baseline)
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


def _baseline_error(plan: AlignPlan, failure: RunFailure) -> AlignmentError:
    error = AlignmentError(
        f"the baseline failed (exit code {failure.exit_code}), so no candidate was run: {failure.message}\n"
        f"its whole output is in {plan.baseline.log_path}"
    )
    # 0 and 1 say that runs are aligned or diverged, which nobody has compared.
    error.exit_code = failure.exit_code if failure.exit_code > ExitCode.DIVERGED else ExitCode.INTERNAL
    return error


def load_summary(name: str, output_dir: Path, *, elapsed_s: float | None) -> RunSummary:
    """What a finished run says about itself in ``run.json`` and ``ledger.json``; raises ``AlignmentError``.

    ``elapsed_s``: ``None`` where nobody watched it from outside; its own seconds stand in for that.
    """
    stated = _read_object(output_dir / "run.json")
    if stated.get("status") != "completed":
        raise AlignmentError(f"{output_dir / 'run.json'}: status is {stated.get('status')!r}, expected 'completed'")
    ledger = _read_object(output_dir / "ledger.json")
    try:
        return RunSummary(
            name=name,
            output_dir=output_dir,
            layout=str(stated["layout"]),
            wall_s=float(stated["wall_s"]),
            rollout_s=float(stated["rollout_s"]),
            elapsed_s=float(stated["wall_s"]) if elapsed_s is None else elapsed_s,
            built={str(what): int(count) for what, count in ledger["built"].items()},
            batches={str(step): str(digest) for step, digest in stated["batches"].items()},
        )
    except KeyError as error:
        raise AlignmentError(f"{output_dir}: key {error} is missing in run.json or ledger.json") from error


def describe_failure(run: PlannedRun, exit_code: int) -> RunFailure:
    """A failed run's own error: its ``error.json``, or the last lines of its log where it wrote none."""
    error_path = run.output_dir / "error.json"
    if error_path.is_file():
        stated = _read_object(error_path)
        return RunFailure(exit_code=int(stated["exit_code"]), message=f"{stated['type']}: {stated['message']}")
    lines = run.log_path.read_text(errors="replace").splitlines() if run.log_path.is_file() else []
    tail = "\n".join(lines[-_NUM_LOG_LINES:]) or "(it wrote nothing)"
    return RunFailure(exit_code=exit_code, message=f"no error.json; the last lines of its output:\n{tail}")


def _execute(run: PlannedRun, *, launch: LaunchRun, console: Console) -> RunSummary | RunFailure:
    run.output_dir.mkdir(parents=True, exist_ok=True)
    console.print(f"[bold]{escape(run.name)}[/bold]  {run.layout}  {run.config.rollout_mock.effective_mode} …")
    started_s = time.perf_counter()
    with console.status(f"{escape(run.name)}: {run.config.max_steps} steps under {run.layout}"):
        exit_code = launch(run)
    elapsed_s = time.perf_counter() - started_s
    if exit_code != 0:
        console.print(f"  [red]failed[/red] with exit code {exit_code} after {elapsed_s:.1f} s")
        return describe_failure(run, exit_code)
    console.print(f"  done in {elapsed_s:.1f} s")
    try:
        return load_summary(run.name, run.output_dir, elapsed_s=elapsed_s)
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
        with console.status(f"{escape(candidate.name)}: comparing metrics, gradients and parameters"):
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
    baseline: RunSummary, candidate: RunSummary, *, tolerance: ToleranceConfig, is_deterministic: bool
) -> Alignment:
    """The verdict on two finished runs; a difference proves something only where each would repeat itself.

    ``is_deterministic``: whether both ran under ``DETERMINISTIC_MODE=1``.
    """
    other_rollouts = _describe_other_rollouts(baseline, candidate)
    if other_rollouts:
        return failed_run(Verdict.INCOMPARABLE, other_rollouts)
    try:
        alignment = compare_runs(baseline.output_dir, candidate.output_dir, tolerance=tolerance)
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


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AlignmentError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise AlignmentError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise AlignmentError(f"{path}: expected an object, found {type(content).__name__}")
    return content
