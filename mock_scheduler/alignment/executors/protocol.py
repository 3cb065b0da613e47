"""The seam between an alignment and whatever carries its runs out: processes of this machine, or jobs of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from mock_scheduler.alignment.plan.planned_run import PlannedRun

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
