"""Carrying out planned runs: their processes, their times, and their own errors where they failed.

Contract: of a run that fails, the exit code and the message are the run's own. Runs that share processes are carried
out in their order; those that a failure of the processes kept from running are started anew, alone.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from mock_scheduler.align.planned import PlannedRun, RunGroup, group_runs
from mock_scheduler.compare.finished_run import RunFailure, load_failure
from mock_scheduler.errors import AlignmentError, ExitCode
from mock_scheduler.launcher import LaunchPlan, end_running, plan_launch, plan_session, run_plan
from mock_scheduler.processes import ending_signals_as_interrupt
from mock_scheduler.run_files import ERROR_FILE
from mock_scheduler.session_files import SessionRun, load_status, read_status
from mock_scheduler.text import count_of

#: Starts the processes of a group's runs, and gives the exit code of each that they came to, by its name.
LaunchRuns = Callable[[Sequence[PlannedRun]], Mapping[str, int]]
#: Given a config's name and folder, what starts its runs.
MakeLaunch = Callable[[str, Path], LaunchRuns]
#: Seconds that a run took, or how it failed.
Outcome = float | RunFailure
#: Is told how a run ended.
OnDone = Callable[[PlannedRun, Outcome], None]

#: In the folder of the first run of several that share processes: which they are, and what the processes print.
SESSION_PLAN, SESSION_LOG = "session_plan.json", "session.log"
_NUM_LOG_LINES = 15


def make_process_launch(config_name: str, config_path: Path) -> LaunchRuns:
    """Runs as processes, through the launcher; their terminal output goes to each run's log."""

    def launch(runs: Sequence[PlannedRun]) -> dict[str, int]:
        if len(runs) > 1:
            return _launch_session(runs, config_name=config_name, config_path=config_path)
        (run,) = runs
        plan = plan_launch(
            run.config,
            config_name=config_name,
            config_path=str(config_path),
            overrides=run.overrides,
            entry=run.entry,
            python=run.python,
        )
        return {run.name: run_plan(_with_environment(plan, run), log_path=run.log_path)}

    return launch


def execute_runs(
    runs: Sequence[PlannedRun],
    *,
    launch: LaunchRuns,
    console: Console,
    share: bool = True,
    at_once: int = 1,
    on_done: OnDone = lambda run, outcome: None,
) -> dict[str, Outcome]:
    """Carry runs out, in groups that share processes; by name, the seconds that each took, or how it failed.

    ``at_once``: groups that go at a time. ``on_done`` is told of every run when its group has ended, and of those that
    had ended before an interrupt. ``console`` shows what is going and how it ended. Raises ``AlignmentError`` where an
    ``error.json`` cannot be read.
    """
    groups = group_runs(runs, share=share)
    outcomes: dict[str, Outcome] = {}

    def take(group: RunGroup, found: Mapping[str, Outcome]) -> None:
        outcomes.update(found)
        for run in group.runs:
            if run.name in found:
                on_done(run, found[run.name])

    try:
        if at_once == 1 or len(groups) == 1:
            for group in groups:
                with console.status(", ".join(escape(run.name) for run in group.runs)):
                    found = _execute_group(group, launch=launch, console=console)
                take(group, found)
            return outcomes
        with ThreadPoolExecutor(max_workers=at_once) as executor, ending_signals_as_interrupt():
            going = {executor.submit(_execute_group, group, launch=launch, console=console): group for group in groups}
            try:
                for future in as_completed(going):
                    take(going[future], future.result())
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                end_running()
                raise
    except KeyboardInterrupt:
        for group in groups:
            take(group, _read_ended([run for run in group.runs if run.name not in outcomes]))
        raise
    return outcomes


def execute_run(run: PlannedRun, *, launch: LaunchRuns, console: Console) -> Outcome:
    """Carry one run out; as ``execute_runs``."""
    return execute_runs([run], launch=launch, console=console)[run.name]


def failed_run_error(what: str, run: PlannedRun, failure: RunFailure, *, consequence: str) -> AlignmentError:
    """The error of a command that cannot go on without ``run``, with the run's own exit code.

    ``what``: the run in words; ``consequence``: what was not done, such as ``nothing was compared``.
    """
    error = AlignmentError(
        f"{what} failed (exit code {failure.exit_code}), so {consequence}: {failure.message}\n"
        f"its whole output is in {run.log_path}"
    )
    # 0 and 1 say that runs are aligned or diverged, which nobody has compared.
    error.exit_code = failure.exit_code if failure.exit_code > ExitCode.DIVERGED else ExitCode.INTERNAL
    return error


def _execute_group(group: RunGroup, *, launch: LaunchRuns, console: Console) -> dict[str, Outcome]:
    for run in group.runs:
        run.output_dir.mkdir(parents=True, exist_ok=True)
    console.print(_describe_group(group))
    outcomes = _launch(group.runs, launch=launch)
    for run in group.runs:
        if run.name not in outcomes:
            # What it had begun to write would be refused.
            shutil.rmtree(run.output_dir)
            run.output_dir.mkdir()
            outcomes |= _launch([run], launch=launch)
    for run in group.runs:
        console.print(_describe_outcome(run, outcomes[run.name], is_alone=len(group.runs) == 1))
    return outcomes


def _launch(runs: Sequence[PlannedRun], *, launch: LaunchRuns) -> dict[str, Outcome]:
    """The outcome of each run that the processes came to."""
    started_s = time.perf_counter()
    codes = launch(runs)
    elapsed_s = time.perf_counter() - started_s
    return _read_outcomes([run for run in runs if run.name in codes], codes, elapsed_s=elapsed_s)


def _read_outcomes(runs: Sequence[PlannedRun], codes: Mapping[str, int], *, elapsed_s: float) -> dict[str, Outcome]:
    """Of runs that ended; what starting their processes took is shared out among them."""
    stated = {run.name: read_status(run.output_dir) for run in runs}
    known_s = [seconds for seconds in stated.values() if seconds is not None]
    shared_s = max(elapsed_s - sum(known_s), 0.0) / max(len(runs), 1)
    outcomes: dict[str, Outcome] = {}
    for run in runs:
        seconds = stated[run.name]
        if codes[run.name] != 0:
            outcomes[run.name] = load_failure(run.output_dir) or _describe_end(run, codes[run.name])
        else:
            outcomes[run.name] = shared_s + (seconds or 0.0)
    return outcomes


def _read_ended(runs: Sequence[PlannedRun]) -> dict[str, Outcome]:
    """Of runs whose processes were interrupted, those that had completed."""
    statuses = [(run.name, load_status(run.output_dir)) for run in runs]
    return {
        name: status.elapsed_s
        for name, status in statuses
        if status is not None and status.elapsed_s is not None and status.exit_code == 0
    }


def _launch_session(runs: Sequence[PlannedRun], *, config_name: str, config_path: Path) -> dict[str, int]:
    """Start all in one set of processes; those that it did not come to are left out."""
    session = [
        SessionRun(
            config_name=config_name,
            config_path=str(config_path),
            overrides=run.overrides,
            output_dir=run.output_dir,
            log_path=run.log_path,
        )
        for run in runs
    ]
    folder = runs[0].output_dir
    plan = plan_session(session, plan_path=folder / SESSION_PLAN, python=runs[0].python)
    run_plan(_with_environment(plan, runs[0]), log_path=folder / SESSION_LOG)
    statuses = {run.name: load_status(run.output_dir) for run in runs}
    return {
        name: status.exit_code
        for name, status in statuses.items()
        if status is not None and status.exit_code is not None
    }


def _with_environment(plan: LaunchPlan, run: PlannedRun) -> LaunchPlan:
    return replace(plan, env={**plan.env, **run.env})


def _describe_group(group: RunGroup) -> str:
    lines = [
        f"[bold]{escape(run.name)}[/bold]  {run.layout}  {run.config.rollout_mock.effective_mode} …"
        for run in group.runs
    ]
    if len(lines) > 1:
        processes = count_of(group.world_size, "process", "processes")
        lines.append(f"  {count_of(len(lines), 'run')} in one group of {processes}")
    return "\n".join(lines)


def _describe_outcome(run: PlannedRun, outcome: Outcome, *, is_alone: bool) -> str:
    name = "" if is_alone else f"{escape(run.name)} "
    if isinstance(outcome, RunFailure):
        return f"  {name}[red]failed[/red] with exit code {outcome.exit_code}"
    return f"  {name}done in {outcome:.1f} s"


def _describe_end(run: PlannedRun, exit_code: int) -> RunFailure:
    """The last lines of the log of a run that wrote no error down."""
    lines = run.log_path.read_text(errors="replace").splitlines() if run.log_path.is_file() else []
    tail = "\n".join(lines[-_NUM_LOG_LINES:]) or "(it wrote nothing)"
    return RunFailure(exit_code=exit_code, message=f"no {ERROR_FILE}; the last lines of its output:\n{tail}")
