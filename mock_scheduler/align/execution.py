"""Carrying out one planned run: its process, its time, and its own error where it failed.

Contract: of a run that fails, the exit code and the message are the run's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from mock_scheduler.align.plan import PlannedRun
from mock_scheduler.compare.finished_run import RunFailure, load_failure
from mock_scheduler.errors import AlignmentError, ExitCode
from mock_scheduler.launcher import plan_launch, run_plan
from mock_scheduler.run_files import ERROR_FILE

#: Starts one run and returns its exit code when it has ended.
LaunchRun = Callable[[PlannedRun], int]
#: Given a config's name and folder, what starts one of its runs.
MakeLaunch = Callable[[str, Path], LaunchRun]

_NUM_LOG_LINES = 15


def make_process_launch(config_name: str, config_path: Path) -> LaunchRun:
    """Runs as processes, through the launcher; their terminal output goes to each run's log."""

    def launch(run: PlannedRun) -> int:
        plan = plan_launch(
            run.config,
            config_name=config_name,
            config_path=str(config_path),
            overrides=run.overrides,
            entry=run.entry,
        )
        return run_plan(plan, log_path=run.log_path)

    return launch


def execute_run(run: PlannedRun, *, launch: LaunchRun, console: Console) -> float | RunFailure:
    """Carry a run out; returns the seconds that it took, or how it failed.

    ``console`` shows that it is going and how it ended. Raises ``AlignmentError`` where its ``error.json`` cannot be
    read.
    """
    run.output_dir.mkdir(parents=True, exist_ok=True)
    console.print(f"[bold]{escape(run.name)}[/bold]  {run.layout}  {run.config.rollout_mock.effective_mode} …")
    started_s = time.perf_counter()
    with console.status(f"{escape(run.name)}: {run.config.max_steps} steps under {run.layout}"):
        exit_code = launch(run)
    elapsed_s = time.perf_counter() - started_s
    if exit_code != 0:
        console.print(f"  [red]failed[/red] with exit code {exit_code} after {elapsed_s:.1f} s")
        return load_failure(run.output_dir) or _describe_end(run, exit_code)
    console.print(f"  done in {elapsed_s:.1f} s")
    return elapsed_s


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


def _describe_end(run: PlannedRun, exit_code: int) -> RunFailure:
    """The last lines of the log of a run that wrote no error down."""
    lines = run.log_path.read_text(errors="replace").splitlines() if run.log_path.is_file() else []
    tail = "\n".join(lines[-_NUM_LOG_LINES:]) or "(it wrote nothing)"
    return RunFailure(exit_code=exit_code, message=f"no {ERROR_FILE}; the last lines of its output:\n{tail}")
