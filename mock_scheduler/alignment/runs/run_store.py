"""The runs of one alignment, each in its folder: made, or taken again where an equal run lies there.

Contract: an interrupted alignment and a cached baseline go on by one mechanism: every completed run has a fingerprint
(``cache``), and is taken again where the same run would be made. ``--overwrite`` starts from nothing. In a folder of
any other origin nothing is removed. The seconds are counted by purpose.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from mock_scheduler.alignment.executors.protocol import LaunchRun, OutlivesDriver
from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.alignment.runs.cache import Reusable
from mock_scheduler.alignment.runs.execution import OnDone, Outcome, execute_runs
from mock_scheduler.alignment.runs.run_cache import RunCache
from mock_scheduler.errors import AlignmentError, ConfigError, ExitCode
from mock_scheduler.run_folder.command_folder import ALIGN_MARKER, FolderMarker, prepare_folder
from mock_scheduler.run_folder.finished_run import RunFailure, RunSummary, load_summary
from mock_scheduler.support.files import remove_leftovers, save_text
from mock_scheduler.support.run_files import RUN_FILE
from mock_scheduler.support.text import list_some
from mock_scheduler.verdict.results import AlignmentTimes


def open_folder(path: Path, *, fresh: bool, marker: FolderMarker = ALIGN_MARKER) -> bool:
    """Make ``path`` ready for an alignment; whether an earlier one lies in it, to be gone on with.

    ``fresh``: empty it first. Raises ``ConfigError`` where it holds anything of another origin.
    """
    is_own = path.is_dir() and not path.is_symlink() and marker.is_in(path)
    if is_own and not fresh:
        remove_leftovers(path)
        save_text(path / marker.name, marker.text)
        return True
    is_used = path.is_dir() and any(path.iterdir())
    if is_used and not is_own and not fresh:
        raise ConfigError(
            f"{path} exists, is not empty and was not made by {marker.command} (no {marker.name} or "
            f"{marker.result_name} in it); choose another folder (--output-dir)"
        )
    prepare_folder(path, marker=marker, overwrite=fresh)
    return False


_NUM_NAMED = 3
Purpose = Literal["baseline", "candidates", "comparison", "emulation", "noise", "referee", "localisation"]
_PURPOSES: tuple[Purpose, ...] = (
    "baseline",
    "candidates",
    "comparison",
    "emulation",
    "noise",
    "referee",
    "localisation",
)


@dataclass(kw_only=True)
class RunStore:
    """Runs by their folders.

    ``at_once``: runs that go at a time; ``console`` shows them. ``has_failed``: one of them did so far.
    """

    launch: LaunchRun
    cache: RunCache
    console: Console
    at_once: int = 1
    has_failed: bool = False
    _seconds: dict[Purpose, float] = field(default_factory=dict)
    _inside_s: list[float] = field(default_factory=list)
    _further: dict[tuple[str, ...], Path] = field(default_factory=dict)
    _started_s: float = field(default_factory=time.perf_counter)

    def execute(self, runs: Sequence[PlannedRun], on_done: OnDone = lambda run, outcome: None) -> dict[str, Outcome]:
        """Takes finished runs again and makes the others; returns outcomes by name. Seconds are the caller's to count.

        ``on_done`` is told of each as soon as it is known. Raises ``AlignmentError`` where an ``error.json`` cannot be
        read.
        """
        outcomes: dict[str, Outcome] = {}
        changed: dict[str, Outcome] = {}
        due: list[PlannedRun] = []
        for run in runs:
            found = self.cache.find(run)
            if isinstance(found, Reusable):
                outcomes[run.name] = found.elapsed_s
                say_taken_again(run, self.console)
                on_done(run, found.elapsed_s)
                continue
            due.append(run)
            if self._goes_on(run):
                continue
            if found.was_there:
                _say(run, f"run anew: {found.reason}", self.console)
            self.cache.clear(run)

        def keep(run: PlannedRun, outcome: Outcome) -> None:
            if not isinstance(outcome, RunFailure):
                failure = self._find_changed_code(run)
                if failure is None:
                    self.cache.keep(run, elapsed_s=outcome)
                else:
                    changed[run.name] = outcome = failure
            if isinstance(self.launch, OutlivesDriver):
                self.launch.settle(run)
            on_done(run, outcome)

        made = execute_runs(due, launch=self.launch, console=self.console, at_once=self.at_once, on_done=keep)
        known = outcomes | made | changed
        self.has_failed |= any(isinstance(outcome, RunFailure) for outcome in known.values())
        return known

    def _goes_on(self, run: PlannedRun) -> bool:
        """Whether a job of this very run goes on, or has ended, that a driver left which is gone."""
        if not isinstance(self.launch, OutlivesDriver):
            return False
        found = self.launch.take_up(run, self.cache.compute_key(run))
        if found:
            _say(run, found, self.console)
        return bool(found)

    def _find_changed_code(self, run: PlannedRun) -> RunFailure | None:
        """A verdict over runs of several forms of a file would be about none of them."""
        try:
            found = self.cache.find_changed_code(run)
        except (OSError, ValueError):
            return None  # the summary says it
        if not found:
            return None
        return RunFailure(
            exit_code=ExitCode.INCOMPARABLE,
            message="its code changed while the alignment ran, so no verdict would be about what lies here now: "
            f"{list_some(found, _NUM_NAMED)}. Give the same command again; finished runs of the present code are kept",
        )

    def summarise(self, run: PlannedRun, outcome: Outcome) -> RunSummary | RunFailure:
        """Returns the summary of a completed run, or how it failed."""
        if isinstance(outcome, RunFailure):
            return outcome
        if run.own_module and not (run.output_dir / RUN_FILE).exists():
            message = (
                f"the module {run.entry} ended without running the program (no {RUN_FILE}); "
                f"it must call {run.program.entry}.main, as docs/my_kernel.md says"
            )
            return RunFailure(exit_code=0, message=message)
        try:
            return load_summary(run.name, run.output_dir, elapsed_s=outcome)
        except AlignmentError as error:
            return RunFailure(exit_code=ExitCode.INCOMPARABLE, message=str(error))

    def execute_once(self, run: PlannedRun, key: tuple[str, ...]) -> Path:
        """Returns the folder of a run, made once for all who ask; raises ``AlignmentError`` where it fails.

        ``key``: equal for equal runs, whatever their names are.
        """
        if key not in self._further:
            outcome = self.execute([run])[run.name]
            if isinstance(outcome, RunFailure):
                raise AlignmentError(f"a further run failed: {outcome.message}\nits output is in {run.log_path}")
            self._further[key] = run.output_dir
        return self._further[key]

    @contextmanager
    def timed(self, purpose: Purpose) -> Iterator[None]:
        """Counts the seconds of the block, without a block inside of it: each block has its own purpose."""
        started_s = time.perf_counter()
        self._inside_s.append(0.0)
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - started_s
            own_s = elapsed_s - self._inside_s.pop()
            self._seconds[purpose] = self._seconds.get(purpose, 0.0) + own_s
            if self._inside_s:
                self._inside_s[-1] += elapsed_s

    def times(self) -> AlignmentTimes:
        """Returns the seconds of every purpose so far."""
        seconds = {f"{purpose}_s": self._seconds.get(purpose, 0.0) for purpose in _PURPOSES}
        return AlignmentTimes(**seconds, total_s=time.perf_counter() - self._started_s)


def say_taken_again(run: PlannedRun, console: Console) -> None:
    """Prints that a finished run is taken again."""
    _say(run, "taken again from an earlier alignment", console)


def _say(run: PlannedRun, what: str, console: Console) -> None:
    console.print(Text.assemble((run.name, "bold"), f"  {run.layout}  {what}"))
