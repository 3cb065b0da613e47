"""Tells of runs in shared processes one by one, each as soon as it has ended, while the rest goes on.

Contract: reads status files, ``error.json`` and logs; nothing is started or written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.launch.sessions import RunStatus, load_status
from mock_scheduler.run_folder.finished_run import RunFailure, load_failure
from mock_scheduler.support.foreign_files import read_tail
from mock_scheduler.support.run_files import ERROR_FILE

#: Seconds that a run took, or how it failed.
Outcome = float | RunFailure
#: Is told how a run ended.
OnDone = Callable[[PlannedRun, Outcome], None]

_NUM_LOG_LINES = 15


@dataclass(kw_only=True, slots=True)
class Follower:
    """Tells of each run of one set of processes, once and in their order.

    ``started_s``: when the processes were started, in seconds since the epoch. The time until the first run began is
    shared out among all.
    """

    runs: Sequence[PlannedRun]
    on_done: OnDone
    started_s: float
    told: set[str] = field(default_factory=set)
    _known_s: float = 0.0
    _start_s: float | None = None

    def look(self) -> None:
        """Tells of the runs that have ended since the last call; of a run that goes on, one small file is read.

        Raises ``AlignmentError`` where an ``error.json`` cannot be read, and the errors of ``on_done``.
        """
        for run in self.runs:
            if run.name in self.told:
                continue
            status = load_status(run.output_dir)
            if status is None or status.exit_code is None:
                return  # no later one has begun
            self._tell(run, self._read_outcome(run, status, status.exit_code))

    def finish(self, codes: Mapping[str, int], *, elapsed_s: float) -> None:
        """Tells of the rest when the processes have ended.

        ``codes``: exit codes of all runs that they came to; ``elapsed_s``: the processes' seconds, for runs that do not
        say theirs. Raises as ``look``.
        """
        self.look()
        rest = [run for run in self.runs if run.name in codes and run.name not in self.told]
        shared_s = max(elapsed_s - self._known_s, 0.0) / max(len(rest), 1)
        for run in rest:
            self._tell(run, shared_s if codes[run.name] == 0 else _read_failure(run, codes[run.name]))

    def _read_outcome(self, run: PlannedRun, status: RunStatus, exit_code: int) -> Outcome:
        if self._start_s is None:
            self._start_s = max(status.started_s - self.started_s, 0.0)
        own_s = (status.elapsed_s or 0.0) + self._start_s / len(self.runs)
        self._known_s += own_s
        return own_s if exit_code == 0 else _read_failure(run, exit_code)

    def _tell(self, run: PlannedRun, outcome: Outcome) -> None:
        self.told.add(run.name)
        self.on_done(run, outcome)


def read_completed(runs: Sequence[PlannedRun]) -> dict[str, float]:
    """Returns, by name, the seconds of runs that had completed before their processes were interrupted."""
    statuses = [(run.name, load_status(run.output_dir)) for run in runs]
    return {
        name: status.elapsed_s
        for name, status in statuses
        if status is not None and status.elapsed_s is not None and status.exit_code == 0
    }


def _read_failure(run: PlannedRun, exit_code: int) -> RunFailure:
    """Returns the error that a run wrote down, or else the last lines of its log."""
    stated = load_failure(run.output_dir)
    if stated is not None:
        return stated
    written = read_tail(run.log_path, _NUM_LOG_LINES) if run.log_path.is_file() else ""
    tail = written or "(it wrote nothing)"
    return RunFailure(exit_code=exit_code, message=f"no {ERROR_FILE}; the last lines of its output:\n{tail}")
