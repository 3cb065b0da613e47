"""Planned runs are carried out: their processes, their times, and their own errors where they failed.

Contract: every run has processes of its own, so nothing goes from one to the next; they are forked from a process that
has imported torch and Megatron where the run has no code of a user's (``launch.warm_start``). Exit code and message of
a failed run are its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from rich.console import Console
from rich.text import Text

from mock_scheduler.alignment.executors.protocol import EndsRuns, LaunchRun, OutlivesDriver
from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.errors import AlignmentError, ExitCode
from mock_scheduler.run_folder.finished_run import RunFailure, load_failure
from mock_scheduler.support.foreign_files import read_tail
from mock_scheduler.support.processes import ending_signals_as_interrupt
from mock_scheduler.support.run_files import ERROR_FILE

#: Seconds that a run took, or how it failed.
Outcome = float | RunFailure
#: Is told how a run ended.
OnDone = Callable[[PlannedRun, Outcome], None]
_NUM_LOG_LINES = 15


def execute_runs(
    runs: Sequence[PlannedRun],
    *,
    launch: LaunchRun,
    console: Console,
    at_once: int = 1,
    on_done: OnDone = lambda run, outcome: None,
) -> dict[str, Outcome]:
    """Carries runs out; returns by name the seconds of each, or how it failed.

    ``at_once``: runs that go at a time. ``on_done`` is told of every run as soon as it has ended, by the thread that
    called this and while others go on, also of runs that had ended before an interrupt. ``console`` shows the runs that
    go and how they ended. Raises ``AlignmentError`` where an ``error.json`` cannot be read.
    """
    outcomes: dict[str, Outcome] = {}

    def take(run: PlannedRun, outcome: Outcome) -> None:
        console.print(_describe_outcome(run, outcome, is_alone=at_once == 1))
        try:
            on_done(run, outcome)
        except KeyboardInterrupt:
            if not isinstance(outcome, RunFailure):
                on_done(run, outcome)  # a run that was made is not made again for that
            raise
        outcomes[run.name] = outcome

    if at_once == 1 or len(runs) == 1:
        for run in runs:
            with console.status(Text(run.name)):
                outcome = _execute(run, launch=launch, console=console)
            take(run, outcome)
    else:
        _execute_at_once(runs, launch=launch, console=console, on_done=take, at_once=at_once)
    return outcomes


def execute_run(run: PlannedRun, *, launch: LaunchRun, console: Console) -> Outcome:
    """Carry one run out; as ``execute_runs``."""
    return execute_runs([run], launch=launch, console=console)[run.name]


def failed_run_error(what: str, run: PlannedRun, failure: RunFailure, *, consequence: str) -> AlignmentError:
    """Returns the error of a command that cannot go on without ``run``, with the run's own exit code.

    ``what``: the run in words; ``consequence``: the work that was not done, as ``nothing was compared``.
    """
    error = AlignmentError(
        f"{what} failed (exit code {failure.exit_code}), so {consequence}: {failure.message}\n"
        f"its whole output is in {run.log_path}"
    )
    # 0 and 1 say that runs are aligned or diverged, which nobody has compared.
    error.exit_code = failure.exit_code if failure.exit_code > ExitCode.DIVERGED else ExitCode.INTERNAL
    return error


def _execute_at_once(
    runs: Sequence[PlannedRun], *, launch: LaunchRun, console: Console, on_done: OnDone, at_once: int
) -> None:
    """Carries runs out in threads of their own, which tell this one how they ended."""
    news: SimpleQueue[Future[tuple[PlannedRun, Outcome]]] = SimpleQueue()

    def execute(run: PlannedRun) -> tuple[PlannedRun, Outcome]:
        return run, _execute(run, launch=launch, console=console)

    with ThreadPoolExecutor(max_workers=at_once) as executor, ending_signals_as_interrupt():
        try:
            for run in runs:
                executor.submit(execute, run).add_done_callback(news.put)
            for _ in runs:
                on_done(*news.get().result())
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            _take_made(news, on_done)
            if isinstance(launch, EndsRuns):
                launch.end_running()
            raise


def _take_made(news: SimpleQueue[Future[tuple[PlannedRun, Outcome]]], on_done: OnDone) -> None:
    """Tells of the runs that were made before an interrupt and not told of yet."""
    while not news.empty():
        future = news.get()
        if not future.cancelled() and future.exception() is None and not isinstance(future.result()[1], RunFailure):
            on_done(*future.result())


def _execute(run: PlannedRun, *, launch: LaunchRun, console: Console) -> Outcome:
    run.output_dir.mkdir(parents=True, exist_ok=True)
    console.print(Text.assemble((run.name, "bold"), f"  {run.layout}{_describe_mode(run)} …"))
    started_s = time.perf_counter()
    code = launch(run)
    if code != 0:
        return _read_failure(run, code)
    return launch.elapsed_s(run) if isinstance(launch, OutlivesDriver) else time.perf_counter() - started_s


def _read_failure(run: PlannedRun, exit_code: int) -> RunFailure:
    """Returns the error that a run wrote down, or else the last lines of its log."""
    stated = load_failure(run.output_dir)
    if stated is not None:
        return stated
    written = read_tail(run.log_path, _NUM_LOG_LINES) if run.log_path.is_file() else ""
    tail = written or "(it wrote nothing)"
    return RunFailure(exit_code=exit_code, message=f"no {ERROR_FILE}; the last lines of its output:\n{tail}")


def _describe_mode(run: PlannedRun) -> str:
    mock = run.config.rollout_mock
    return "" if mock is None else f"  {mock.effective_mode}"


def _describe_outcome(run: PlannedRun, outcome: Outcome, *, is_alone: bool) -> Text:
    name = "" if is_alone else f"{run.name} "
    if isinstance(outcome, RunFailure):
        return Text.assemble(f"  {name}", ("failed", "red"), f" with exit code {outcome.exit_code}")
    return Text(f"  {name}done in {outcome:.1f} s")
