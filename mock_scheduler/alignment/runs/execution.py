"""Planned runs are carried out: their processes, their times, and their own errors where they failed.

Contract: exit code and message of a failed run are its own. Runs that share processes are carried out in their order; a
run kept from starting by a failure of the processes is started anew, alone.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.text import Text

from mock_scheduler.alignment.plan.planned_run import PlannedRun, RunGroup, group_runs
from mock_scheduler.alignment.runs.progress import Follower, OnDone, Outcome, read_completed
from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.errors import AlignmentError, ExitCode
from mock_scheduler.launch.launcher import LaunchPlan, RunningProcesses, plan_launch, plan_session, run_plan
from mock_scheduler.launch.sessions import SessionRun, load_status
from mock_scheduler.run_folder.finished_run import RunFailure
from mock_scheduler.support.processes import ending_signals_as_interrupt
from mock_scheduler.support.text import count_of

#: Called now and then while processes go on, by the thread that waits for them.
Watch = Callable[[], None]
#: Starts the processes of a group's runs, and gives the exit code of each that they came to, by its name; while several
#: share processes, ``Watch`` may tell of those that have ended already.
LaunchRuns = Callable[[Sequence[PlannedRun], Watch], Mapping[str, int]]
#: Given a config's name and folder, what starts its runs.
MakeLaunch = Callable[[str, Path], LaunchRuns]


@runtime_checkable
class EndsRuns(Protocol):
    """A starter of runs from several threads that can end them all: a ``LaunchRuns`` of processes."""

    def end_running(self) -> None:
        """Ends the processes of all threads; the main thread calls it when it is interrupted."""
        ...


#: In the folder of the first run of several that share processes: which they are, and what the processes print.
SESSION_PLAN, SESSION_LOG = "session_plan.json", "session.log"


def make_process_launch(config_name: str, config_path: Path) -> LaunchRuns:
    """Makes runs processes, through the launcher; their terminal output goes to each run's log."""
    return _ProcessLaunch(config_name=config_name, config_path=config_path)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ProcessLaunch:
    """Starts the processes of runs of one configuration, from any thread, and can end them."""

    config_name: str
    config_path: Path
    running: RunningProcesses = field(default_factory=RunningProcesses)

    def __call__(self, runs: Sequence[PlannedRun], watch: Watch) -> dict[str, int]:
        """Starts the processes, as a ``LaunchRuns``."""
        if len(runs) > 1:
            return self._launch_session(runs, watch)
        (run,) = runs
        source = ConfigSource(
            config_name=self.config_name, config_path=str(self.config_path), overrides=tuple(run.overrides)
        )
        plan = plan_launch(
            run.config,
            run.program.arguments(run.entry, source),
            num_processes=run.program.num_processes(run.config),
            python=run.python,
        )
        return {run.name: run_plan(_with_environment(plan, run), log_path=run.log_path, running=self.running)}

    def end_running(self) -> None:
        """Ends the processes that other threads wait for."""
        self.running.end()

    def _launch_session(self, runs: Sequence[PlannedRun], watch: Watch) -> dict[str, int]:
        """Starts all in one set of processes; runs that it did not come to are left out."""
        session = [
            SessionRun(
                config_name=self.config_name,
                config_path=str(self.config_path),
                overrides=run.overrides,
                output_dir=run.output_dir,
                log_path=run.log_path,
            )
            for run in runs
        ]
        first = runs[0]
        plan = plan_session(
            session, program=first.program, plan_path=first.output_dir / SESSION_PLAN, python=first.python
        )
        log_path = first.output_dir / SESSION_LOG
        run_plan(_with_environment(plan, first), log_path=log_path, watch=watch, running=self.running)
        statuses = {run.name: load_status(run.output_dir) for run in runs}
        return {
            name: status.exit_code
            for name, status in statuses.items()
            if status is not None and status.exit_code is not None
        }


def execute_runs(
    runs: Sequence[PlannedRun],
    *,
    launch: LaunchRuns,
    console: Console,
    share: bool = True,
    at_once: int = 1,
    on_done: OnDone = lambda run, outcome: None,
) -> dict[str, Outcome]:
    """Carries runs out, in groups that share processes; returns by name the seconds of each, or how it failed.

    ``at_once``: groups that go at a time. ``on_done`` is told of every run as soon as it has ended, by the thread that
    called this and while others go on, also of runs that had ended before an interrupt. ``console`` shows the runs that
    go and how they ended. Raises ``AlignmentError`` where an ``error.json`` cannot be read.
    """
    groups = group_runs(runs, share=share)
    outcomes: dict[str, Outcome] = {}

    def take(run: PlannedRun, outcome: Outcome) -> None:
        on_done(run, outcome)
        outcomes[run.name] = outcome

    try:
        if at_once == 1 or len(groups) == 1:
            for group in groups:
                _execute_alone(group, launch=launch, console=console, on_done=take)
        else:
            _execute_at_once(groups, launch=launch, console=console, on_done=take, at_once=at_once)
    except KeyboardInterrupt:
        ended = read_completed([run for run in runs if run.name not in outcomes])
        for run in runs:
            if run.name in ended:
                take(run, ended[run.name])
        raise
    return outcomes


def execute_run(run: PlannedRun, *, launch: LaunchRuns, console: Console) -> Outcome:
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


def _execute_alone(group: RunGroup, *, launch: LaunchRuns, console: Console, on_done: OnDone) -> None:
    """Carries one group out beside no other, in this thread."""
    with console.status(Text(", ".join(run.name for run in group.runs))) as status:

        def take(run: PlannedRun, outcome: Outcome) -> None:
            # Whoever is told may show a status of its own.
            status.stop()
            on_done(run, outcome)
            status.start()

        _execute_group(group, launch=launch, console=console, on_done=take)


def _execute_at_once(
    groups: Sequence[RunGroup], *, launch: LaunchRuns, console: Console, on_done: OnDone, at_once: int
) -> None:
    """Carries groups out in threads of their own, which tell this one how runs ended."""
    news: SimpleQueue[tuple[PlannedRun, Outcome] | Future[None]] = SimpleQueue()
    is_over = threading.Event()
    with ThreadPoolExecutor(max_workers=at_once) as executor, ending_signals_as_interrupt():
        try:
            for group in groups:
                future = executor.submit(
                    _execute_group,
                    group,
                    launch=launch,
                    console=console,
                    on_done=lambda run, outcome: news.put((run, outcome)),
                    is_over=is_over,
                )
                future.add_done_callback(news.put)
            num_going = len(groups)
            while num_going:
                item = news.get()
                if isinstance(item, Future):
                    item.result()
                    num_going -= 1
                else:
                    on_done(*item)
        except BaseException:
            is_over.set()
            executor.shutdown(wait=False, cancel_futures=True)
            if isinstance(launch, EndsRuns):
                launch.end_running()
            raise


def _execute_group(
    group: RunGroup,
    *,
    launch: LaunchRuns,
    console: Console,
    on_done: OnDone,
    is_over: threading.Event | None = None,
) -> None:
    """Carries one group out; nothing is started any more once ``is_over`` is set: nobody waits for it."""

    def tell(run: PlannedRun, outcome: Outcome) -> None:
        if is_over is None or not is_over.is_set():
            console.print(_describe_outcome(run, outcome, is_alone=len(group.runs) == 1))
            on_done(run, outcome)

    for run in group.runs:
        run.output_dir.mkdir(parents=True, exist_ok=True)
    for line in _describe_group(group):
        console.print(line)
    told = _launch(group.runs, launch=launch, on_done=tell)
    for run in group.runs:
        if is_over is not None and is_over.is_set():
            return
        if run.name not in told:
            # What it had begun to write would be refused.
            shutil.rmtree(run.output_dir)
            run.output_dir.mkdir()
            _launch([run], launch=launch, on_done=tell)


def _launch(runs: Sequence[PlannedRun], *, launch: LaunchRuns, on_done: OnDone) -> set[str]:
    """Starts processes and waits for them; returns the names of the runs that they came to, each told of."""
    follower = Follower(runs=runs, on_done=on_done, started_s=time.time())
    started_s = time.perf_counter()
    codes = launch(runs, follower.look)
    follower.finish(codes, elapsed_s=time.perf_counter() - started_s)
    return follower.told


def _with_environment(plan: LaunchPlan, run: PlannedRun) -> LaunchPlan:
    return replace(plan, env={**plan.env, **run.env})


def _describe_group(group: RunGroup) -> list[Text]:
    lines = [Text.assemble((run.name, "bold"), f"  {run.layout}{_describe_mode(run)} …") for run in group.runs]
    if len(lines) > 1:
        processes = count_of(group.world_size, "process", "processes")
        lines.append(Text(f"  {count_of(len(lines), 'run')} in one group of {processes}"))
    return lines


def _describe_mode(run: PlannedRun) -> str:
    mock = run.config.rollout_mock
    return "" if mock is None else f"  {mock.effective_mode}"


def _describe_outcome(run: PlannedRun, outcome: Outcome, *, is_alone: bool) -> Text:
    name = "" if is_alone else f"{run.name} "
    if isinstance(outcome, RunFailure):
        return Text.assemble(f"  {name}", ("failed", "red"), f" with exit code {outcome.exit_code}")
    return Text(f"  {name}done in {outcome:.1f} s")
