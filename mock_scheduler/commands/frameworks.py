"""``mock-scheduler frameworks``: the training frameworks that there are adapters for, and the files that are read."""

from __future__ import annotations

from rich.table import Table

from mock_scheduler.adapters.formats import FORMATS
from mock_scheduler.adapters.frameworks import find_frameworks, look_around
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import build_console
from mock_scheduler.errors import ExitCode
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.documents import STDOUT, write_json


def list_frameworks(*, json_path: str | None = None, console: Console | None = None) -> int:
    """Print a line for each framework and the formats of files, or all of it as JSON; returns the exit code.

    ``json_path``: a file, or ``-`` for standard output in place of the text.
    """
    states = look_around(find_frameworks())
    if json_path != STDOUT:
        table = Table("framework", "here", "tried with", "state", "a replay starts no", "page")
        table.columns[-1].no_wrap = True  # a path in one piece can be opened
        for column in table.columns:
            column.overflow = "fold"
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
        out = console or build_console()
        out.print(table)
        for kind in ("recording", "trace"):
            names = ", ".join(one.name for one in FORMATS if one.becomes == kind)
            out.print(f"files that mock-scheduler import makes a {kind} of: {names}", markup=False, highlight=False)
        out.print("what each holds, and what is not read: docs/import_export.md", markup=False, highlight=False)
    formats: list[JSON] = [
        {"name": one.name, "framework": one.framework, "becomes": one.becomes or None, "refusal": one.refusal or None}
        for one in FORMATS
    ]
    write_json({"frameworks": [state.as_json() for state in states], "formats": formats}, json_path)
    return ExitCode.ALIGNED
