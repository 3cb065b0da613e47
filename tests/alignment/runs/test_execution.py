"""Runs that share processes: how each ended is told while the others go on."""

import io
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.alignment.runs.execution import Watch, execute_runs
from mock_scheduler.alignment.runs.progress import Outcome
from mock_scheduler.display.console import Console
from mock_scheduler.launch.launcher import LaunchPlan, run_plan
from mock_scheduler.launch.sessions import RunStatus, write_status
from mock_scheduler.run_folder.finished_run import RunFailure
from tests.alignment.simulated import planned

FAILED = {"type": "ContractError", "message": "it went wrong", "exit_code": 3, "global_rank": 0}


@dataclass
class Session:
    """Processes that make runs in order, of which ``ends`` says how; the parent looks after each."""

    ends: dict[str, int | None]
    output: io.StringIO = field(default_factory=io.StringIO)
    events: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def launch(self, runs: Sequence[PlannedRun], watch: Watch) -> dict[str, int]:
        """``None`` in ``ends``: the processes end in the middle of that run; alone it then completes."""
        codes: dict[str, int] = {}
        launched_s = time.time()
        for run in runs:
            self.events.append(f"{run.name} starts")
            code = self.ends[run.name] if len(runs) > 1 else self.ends[run.name] or 0
            write_status(run.output_dir, RunStatus(started_s=launched_s))
            watch()
            if code is None:
                return codes
            if code:
                (run.output_dir / "error.json").write_text(json.dumps(FAILED))
            write_status(run.output_dir, RunStatus(started_s=launched_s, elapsed_s=2.0, exit_code=code))
            codes[run.name] = code
            watch()
            watch()
        self.events.append("processes end")
        return codes

    def execute(self, runs: Sequence[PlannedRun]) -> dict[str, Outcome]:
        def on_done(run: PlannedRun, outcome: Outcome) -> None:
            self.events.append(f"{run.name} is taken")
            self.lines.append(self.output.getvalue().splitlines()[-1])

        return execute_runs(runs, launch=self.launch, console=Console(file=self.output, width=80), on_done=on_done)


def make_runs(folder: Path, *names: str) -> list[PlannedRun]:
    return [planned(name, folder) for name in names]


def test_each_run_of_a_group_is_told_and_taken_before_the_next_one_starts(tmp_path: Path) -> None:
    """All lines came when the last run of a group had ended: of a dozen candidates none for many minutes."""
    session = Session({"one": 0, "two": 3, "three": 0})
    outcomes = session.execute(make_runs(tmp_path, "one", "two", "three"))
    assert session.events == [
        *("one starts", "one is taken"),
        *("two starts", "two is taken"),
        *("three starts", "three is taken"),
        "processes end",
    ]
    assert session.lines == ["  one done in 2.0 s", "  two failed with exit code 3", "  three done in 2.0 s"]
    assert outcomes["two"] == RunFailure(exit_code=3, message="ContractError: it went wrong")
    assert [outcomes[name] for name in ("one", "three")] == pytest.approx([2.0, 2.0], abs=0.05)


def test_a_run_that_the_processes_did_not_finish_is_started_anew_and_the_finished_one_is_not(tmp_path: Path) -> None:
    session = Session({"one": 0, "two": None, "three": 0})
    session.execute(make_runs(tmp_path, "one", "two", "three"))
    assert session.events == [
        *("one starts", "one is taken"),
        *("two starts", "two starts", "two is taken", "processes end"),
        *("three starts", "three is taken", "processes end"),
    ]


def test_runs_that_leave_no_status_share_the_seconds_of_their_processes(tmp_path: Path) -> None:
    def launch(runs: Sequence[PlannedRun], watch: Watch) -> dict[str, int]:
        watch()
        return {run.name: 0 for run in runs}

    outcomes = execute_runs(
        make_runs(tmp_path, "one", "two"), launch=launch, console=Console(file=io.StringIO(), width=80)
    )
    assert list(outcomes) == ["one", "two"]
    assert outcomes["one"] == outcomes["two"]


def test_what_an_interrupt_kept_from_being_taken_is_taken_then(tmp_path: Path) -> None:
    """A run that had ended, but whose taking was interrupted, is taken once more, and no other."""
    taken: list[str] = []

    def on_done(run: PlannedRun, outcome: Outcome) -> None:
        taken.append(run.name)
        if taken == ["one", "two"]:
            raise KeyboardInterrupt

    session = Session({"one": 0, "two": 0, "three": 0})
    with pytest.raises(KeyboardInterrupt):
        execute_runs(
            make_runs(tmp_path, "one", "two", "three"),
            launch=session.launch,
            console=Console(file=io.StringIO(), width=80),
            on_done=on_done,
        )
    assert taken == ["one", "two", "two"]


def in_groups(folder: Path, *names: str) -> list[PlannedRun]:
    """Runs of which two go in each group, by their number of processes."""
    return [
        planned(name, folder, parallel={"data_parallel_size": size}, train_env_manager={"num_env_groups": 4})
        for name, size in zip(names, (1, 1, 2, 2), strict=True)
    ]


def test_groups_that_go_at_a_time_are_taken_by_the_thread_that_asked(tmp_path: Path) -> None:
    one_is_taken, threads = threading.Event(), {}

    def on_done(run: PlannedRun, outcome: Outcome) -> None:
        threads[run.name] = threading.current_thread()
        if run.name == "one":
            one_is_taken.set()

    def launch(runs: Sequence[PlannedRun], watch: Watch) -> dict[str, int]:
        for run in runs:
            if run.name == "two":
                assert one_is_taken.wait(timeout=60)  # while its own group goes on
            write_status(run.output_dir, RunStatus(started_s=0.0, elapsed_s=2.0, exit_code=0))
            watch()
        return {run.name: 0 for run in runs}

    runs = in_groups(tmp_path, "one", "two", "three", "four")
    outcomes = execute_runs(
        runs, launch=launch, console=Console(file=io.StringIO(), width=80), at_once=2, on_done=on_done
    )
    assert outcomes == {"one": 2.0, "two": 2.0, "three": 2.0, "four": 2.0}
    assert set(threads) == {"one", "two", "three", "four"}
    assert set(threads.values()) == {threading.current_thread()}


@dataclass(frozen=True)
class _InterruptedLaunch:
    """Two groups that go until the interrupt ends them; ``started``: the runs of every start."""

    started: list[list[str]] = field(default_factory=list)
    is_interrupted: threading.Event = field(default_factory=threading.Event)
    others_go: threading.Event = field(default_factory=threading.Event)

    def __call__(self, runs: Sequence[PlannedRun], watch: Watch) -> dict[str, int]:
        self.started.append([run.name for run in runs])
        if runs[0].name == "three":
            self.others_go.set()
            assert self.is_interrupted.wait(timeout=60)
            return {}  # ended by the interrupt
        assert self.others_go.wait(timeout=60)
        write_status(runs[0].output_dir, RunStatus(started_s=0.0, elapsed_s=2.0, exit_code=0))
        watch()
        assert self.is_interrupted.wait(timeout=60)
        return {runs[0].name: 0}

    def end_running(self) -> None:
        self.is_interrupted.set()


def test_an_interrupt_starts_nothing_anew_in_the_other_threads(tmp_path: Path) -> None:
    """The processes that it ended had not come to all runs, and these were started anew, alone, to their end."""
    launch = _InterruptedLaunch()

    def interrupt(run: PlannedRun, outcome: Outcome) -> None:
        if not launch.is_interrupted.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute_runs(
            in_groups(tmp_path, "one", "two", "three", "four"),
            launch=launch,
            console=Console(file=io.StringIO(), width=80),
            at_once=2,
            on_done=interrupt,
        )
    assert sorted(launch.started) == [["one", "two"], ["three", "four"]]


def python_plan(code: str) -> LaunchPlan:
    return LaunchPlan(argv=(sys.executable, "-c", code), env={}, num_processes=1, world_size=1)


def test_a_run_is_watched_while_it_goes_on(tmp_path: Path) -> None:
    told = tmp_path / "told"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(told)!r}).exists(): time.sleep(0.02)\n"
    assert run_plan(python_plan(f"{wait}raise SystemExit(5)"), watch=told.touch) == 5


def test_a_watcher_that_fails_ends_the_run(tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_plan(python_plan("import time; time.sleep(600)"), log_path=tmp_path / "log", watch=fail)
