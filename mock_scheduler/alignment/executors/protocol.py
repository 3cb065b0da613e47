"""The seam between an alignment and whatever carries its runs out: processes of this machine, or jobs of a cluster.

A ``LaunchRun`` is all that an alignment needs. ``jobs.ClusterLaunch`` is one for any ``Cluster``, so a cluster is four
short methods, and what a lost job, an interrupt or a killed driver means is decided once for all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.errors import MockSchedulerError
from mock_scheduler.launch.job import MODULE

#: Starts the processes of a run, waits for them, and gives the exit code.
LaunchRun = Callable[[PlannedRun], int]
#: Given a config's name and folder, what starts its runs.
MakeLaunch = Callable[[str, Path], LaunchRun]


@runtime_checkable
class EndsRuns(Protocol):
    """A starter of runs from several threads that can end them all: a ``LaunchRun`` of processes or jobs."""

    def end_running(self) -> None:
        """Ends the runs of all threads; the main thread calls it when it is interrupted."""
        ...


@runtime_checkable
class OutlivesDriver(Protocol):
    """A ``LaunchRun`` whose runs go on when this process is gone, so another one finds them."""

    def take_up(self, run: PlannedRun, key: str) -> str:
        """Says which earlier job of this very run goes on or has ended, for the next call to wait for.

        ``key``: the digest of everything that decides the run. Empty where there is none: the run's folder may be
        emptied then, for the job of another run there was cancelled.
        """
        ...

    def settle(self, run: PlannedRun) -> None:
        """Is told that a run's end was taken: no later call may find its job."""
        ...

    def end_earlier(self, root: Path) -> None:
        """Cancels the jobs of all runs below a folder, which is about to be emptied."""
        ...

    def elapsed_s(self, run: PlannedRun) -> float:
        """Gives the seconds that a run took which has just ended, without those in a queue."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """Holds a job to submit. ``name``: for people; ``token``: of its own, hexadecimal, to find it by.

    ``text``: for ``launch.job``. ``num_processes``: of the run's layout. ``log_dir``: a folder for the cluster's files.
    """

    name: str
    token: str
    text: str
    num_processes: int
    log_dir: Path

    @property
    def command(self) -> tuple[str, ...]:
        """Returns the words of the command that carries it out."""
        return (sys.executable, "-P", "-m", MODULE, self.text)


Phase = Literal["waiting", "running", "unplaced", "lost", "ended"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """Holds the state of a job as its cluster has it, in the cluster's words (``detail``).

    ``unplaced``: it is over because it waited too long. ``lost``: it is over, and another attempt may do better: its
    node is gone, or its process. ``ended``: it is over for a reason that would be there again: a limit of time or
    memory, or somebody cancelled it.
    """

    phase: Phase
    detail: str

    @property
    def is_over(self) -> bool:
        """Whether no process of the job runs or will run."""
        return self.phase in ("unplaced", "lost", "ended")


class ClusterError(MockSchedulerError, OSError):
    """A cluster does not answer; its jobs may go on."""


class Cluster(Protocol):
    """Queues, starts, ends and logs jobs. Methods may be called from several threads; they raise ``ClusterError``."""

    @property
    def name(self) -> str:
        """Returns the cluster in a word, for records and messages."""
        ...

    def submit(self, job: Submission) -> str:
        """Submits a job and returns its number or name; raises ``AlignmentError`` where it is refused."""
        ...

    def find(self, token: str, log_dir: Path) -> str | None:
        """Finds a job that was submitted, by a driver that was killed before it wrote down which one."""
        ...

    def read_state(self, job_id: str) -> JobState:
        """Reads the state of a job; one that the cluster does not know is lost."""
        ...

    def cancel(self, job_id: str) -> None:
        """Asks for a job's end; without effect on one that is over."""
        ...

    def find_log(self, job_id: str, log_dir: Path) -> tuple[str, str]:
        """Says where the cluster's own log of a job is, and gives its text as far as it is there."""
        ...
