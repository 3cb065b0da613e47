"""Runs are carried out one by one or several at a time: how each ended is told while the others go on."""

import io
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.alignment.runs.execution import Outcome, execute_runs
from mock_scheduler.display.console import Console
from mock_scheduler.launch.launcher import LaunchPlan, RunningProcesses, run_plan
from mock_scheduler.run_folder.finished_run import RunFailure
from tests.alignment.simulated import planned

FAILED = {"type": "ContractError", "message": "it went wrong", "exit_code": 3, "global_rank": 0}


def make_runs(folder: Path, *names: str) -> list[PlannedRun]:
    return [planned(name, folder) for name in names]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=80)


def test_each_run_is_told_and_taken_before_the_next_one_starts(tmp_path: Path) -> None:
    """All lines came when the last run had ended: of a dozen candidates none for many minutes."""
    output, events, lines = io.StringIO(), [], []
    ends = {"one": 0, "two": 3, "three": 0}

    def launch(run: PlannedRun) -> int:
        events.append(f"{run.name} starts")
        if ends[run.name]:
            (run.output_dir / "error.json").write_text(json.dumps(FAILED))
        return ends[run.name]

    def on_done(run: PlannedRun, outcome: Outcome) -> None:
        events.append(f"{run.name} is taken")
        lines.append(output.getvalue().splitlines()[-1].partition(" in ")[0])

    outcomes = execute_runs(
        make_runs(tmp_path, *ends), launch=launch, console=Console(file=output, width=80), on_done=on_done
    )
    assert events == [f"{name} {what}" for name in ends for what in ("starts", "is taken")]
    assert lines == ["  done", "  failed with exit code 3", "  done"]
    assert outcomes["two"] == RunFailure(exit_code=3, message="ContractError: it went wrong")
    assert all(isinstance(outcomes[name], float) for name in ("one", "three"))


def test_a_failure_without_an_error_of_its_own_has_the_end_of_its_log(tmp_path: Path) -> None:
    def launch(run: PlannedRun) -> int:
        run.log_path.write_text("one line\nKilled\n")
        return 137

    (failure,) = execute_runs(make_runs(tmp_path, "one"), launch=launch, console=quiet()).values()
    assert failure == RunFailure(
        exit_code=137, message="no error.json; the last lines of its output:\none line\nKilled"
    )


def test_what_an_interrupt_kept_from_being_taken_is_taken_then(tmp_path: Path) -> None:
    """A run that had ended, but whose taking was interrupted, is taken once more, and no other."""
    taken: list[str] = []

    def on_done(run: PlannedRun, outcome: Outcome) -> None:
        taken.append(run.name)
        if taken == ["one", "two"]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute_runs(make_runs(tmp_path, "one", "two", "three"), launch=lambda run: 0, console=quiet(), on_done=on_done)
    assert taken == ["one", "two", "two"]


def test_runs_that_go_at_a_time_are_taken_by_the_thread_that_asked(tmp_path: Path) -> None:
    one_is_taken, threads = threading.Event(), {}

    def on_done(run: PlannedRun, outcome: Outcome) -> None:
        threads[run.name] = threading.current_thread()
        if run.name == "one":
            one_is_taken.set()

    def launch(run: PlannedRun) -> int:
        # While another one goes on, which began with it.
        return 0 if run.name == "one" or one_is_taken.wait(timeout=60) else 70

    names = ("one", "two", "three", "four")
    outcomes = execute_runs(make_runs(tmp_path, *names), launch=launch, console=quiet(), at_once=2, on_done=on_done)
    assert set(outcomes) == set(names)
    assert not any(isinstance(outcome, RunFailure) for outcome in outcomes.values())
    assert set(threads) == set(names)
    assert set(threads.values()) == {threading.current_thread()}


@dataclass(frozen=True)
class _InterruptedLaunch:
    """The runs that are started go until the interrupt ends them, but for ``made``; ``started``: all of them."""

    made: tuple[str, ...]
    started: list[str] = field(default_factory=list)
    is_interrupted: threading.Event = field(default_factory=threading.Event)

    def __call__(self, run: PlannedRun) -> int:
        self.started.append(run.name)
        if run.name in self.made:
            return 0
        assert self.is_interrupted.wait(timeout=60)
        return 143

    def end_running(self) -> None:
        self.is_interrupted.set()


def test_an_interrupt_starts_nothing_more_and_loses_no_run_that_was_made(tmp_path: Path) -> None:
    launch = _InterruptedLaunch(made=("one", "two"))
    taken: list[str] = []

    def interrupt(run: PlannedRun, outcome: Outcome) -> None:
        taken.append(run.name)
        if len(taken) == 1:
            wait_until(lambda: {"three", "four"} <= set(launch.started))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute_runs(
            make_runs(tmp_path, "one", "two", "three", "four", "five"),
            launch=launch,
            console=quiet(),
            at_once=2,
            on_done=interrupt,
        )
    assert set(launch.started) == {"one", "two", "three", "four"}
    assert set(taken) == {"one", "two"}


def wait_until(is_so: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if is_so():
            return
        pause.wait(0.02)
    raise AssertionError("it did not come about within a minute")


def python_plan(code: str) -> LaunchPlan:
    return LaunchPlan(argv=(sys.executable, "-c", code), env={}, num_processes=1, world_size=1)


def test_what_is_started_after_all_were_ended_is_ended_too(tmp_path: Path) -> None:
    """A thread that was about to start a run when the main one was interrupted."""
    running = RunningProcesses()
    running.end()
    assert run_plan(python_plan("import time; time.sleep(600)"), log_path=tmp_path / "log", running=running) == 143
