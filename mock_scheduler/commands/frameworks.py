"""``mock-scheduler frameworks``: the training frameworks that there are adapters for, and what of them is here."""

from __future__ import annotations

from rich.table import Table

from mock_scheduler.adapters.frameworks import find_frameworks, look_around
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import build_console
from mock_scheduler.errors import ExitCode
from mock_scheduler.support.documents import STDOUT, write_json


def list_frameworks(*, json_path: str | None = None, console: Console | None = None) -> int:
    """Print a line for each framework, or with ``-`` as ``json_path`` all of it as JSON; returns the exit code."""
    states = look_around(find_frameworks())
    if json_path != STDOUT:
        table = Table("framework", "here", "tried with", "state", "a replay starts no", "page")
        table.columns[-1].overflow = "fold"
        for state in states:
            framework = state.framework
            table.add_row(
                framework.name,
                state.installed or "–",
                ", ".join((*framework.tried, *framework.tried_parts)) or "–",
                state.status,
                framework.suppressed,
                framework.page,
            )
        (console or build_console()).print(table)
    write_json({"frameworks": [state.as_json() for state in states]}, json_path)
    return ExitCode.ALIGNED
