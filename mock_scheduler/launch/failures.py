"""A run that a signal ended is told of it: on stderr, and in the ``error.json`` of its folder.

Contract: standard library only, besides reading the plan of a session when something has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mock_scheduler.support.processes import (
    RankExit,
    describe_signal,
    find_culprit,
    meant_exit_code,
    write_signal_error,
)
from mock_scheduler.support.terminal_streams import print_message


def report_failed_ranks(failures: Sequence[RankExit], told_to: Path) -> int:
    """Names a rank ended by a signal, where it is the cause; returns the exit code of the cause."""
    culprit = find_culprit(failures)
    if culprit.code < 0:
        message = f"rank {culprit.global_rank} was ended by {describe_signal(culprit.code)}"
        print_message(message)
        for problem in write_error(told_to, message, code=culprit.code, global_rank=culprit.global_rank):
            print_message(problem)
    return meant_exit_code(culprit.code)


def write_error(
    told_to: Path, message: str, *, code: int, global_rank: int | None, cwd: Path | None = None
) -> list[str]:
    """Writes a signal's end to the folder of the run, or of the ended one of a session; returns lines to say."""
    folder: Path | None = (cwd or Path()) / told_to
    if told_to.is_absolute() and told_to.is_file():
        # Imports what reads configurations, for which no rank should wait at its start.
        from mock_scheduler.launch.sessions import find_running

        folder = find_running(told_to)
    problem = None if folder is None else write_signal_error(folder, message, code=code, global_rank=global_rank)
    return [] if problem is None else [problem]
