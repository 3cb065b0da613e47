"""Writes into README and docs what a script can know: ``launch/docs.sh [--check] [--runs FOLDER] [PAGE ...]``.

Without ``--runs`` it writes what follows from definitions. With it, the commands of the pages run in FOLDER too, for
about half an hour, and the pages get their output. ``--check`` writes nothing, shows what would change, and exits with
1 where anything would.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mock_scheduler.errors import ConfigError, ExitCode, MockSchedulerError
from mock_scheduler.support.arguments import parse_arguments
from tests.docs.made.generators import render_all
from tests.docs.made.pages import ROOT
from tests.docs.made.session import SESSIONS, prepare_folder, renew_page


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or checks; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        return parse_arguments(write, given, prog="launch/docs.sh")
    except MockSchedulerError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_code)


def write(
    pages: Annotated[
        list[str] | None, typer.Argument(help="pages whose commands run; else all", show_default=False)
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="write nothing; show what would change")] = False,
    runs: Annotated[Path | None, typer.Option("--runs", help="also run the pages' commands, in this folder")] = None,
) -> int:
    """Write into README and docs what a script can know."""
    if pages and (runs is None or not set(pages) <= set(SESSIONS)):
        raise ConfigError(f"pages are named beside --runs, and are of {', '.join(SESSIONS)}")
    made, problems = render_all(), list[str]()
    if runs is not None:
        prepare_folder(runs)
        printed: list[str] = []
        for page in (ROOT / name for name in pages or SESSIONS):
            text = made.get(page) or page.read_text(encoding="utf-8")
            made[page], found = renew_page(page, text, runs, printed)
            problems += found
    changes = [change for path, text in made.items() if (change := _show_change(path, text))]
    sys.stdout.write("".join(changes))
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    if not check:
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
    return int(ExitCode.DIVERGED if problems or (check and changes) else ExitCode.ALIGNED)


def _show_change(path: Path, text: str) -> str:
    """Returns the change of a page as a unified diff; empty where there is none."""
    name = path.relative_to(ROOT).as_posix()
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = difflib.unified_diff(old.splitlines(keepends=True), text.splitlines(keepends=True), name, name)
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
