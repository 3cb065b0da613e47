"""Plans, runs, proves and reports for ``mock-scheduler align``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.alignment.executors.protocol import MakeLaunch
from mock_scheduler.api.align import PAGE_FILE, AlignmentOrder, view_alignment
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import build_console
from mock_scheduler.errors import ConfigError, UnwrittenError
from mock_scheduler.report.alignment.ci import alignment_summary, write_junit
from mock_scheduler.report.alignment.page import write_alignment_page
from mock_scheduler.report.alignment.terminal import print_report
from mock_scheduler.report.alignment.view import AlignmentView
from mock_scheduler.support.run_files import ALIGN_FILE, LOG_FILE

JUNIT_FILE = "align.junit.xml"


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignOptions:
    """Holds options of an alignment.

    Attributes:
        output_dir: the folder of all runs and reports; ``None``: the configuration's.
        overwrite: run everything anew.
        recording_dir: a recording to replay in the baseline too; ``None``: the baseline records.
        is_ci: print only a short summary, and write JUnit XML.
        json_path, html_path: further copies of result and page.
        run_stored_code: also run the code that a stored configuration names.
        takes_foreign: also take finished runs again that another user made; ``None`` is ``run_stored_code``.
    """

    output_dir: Path | None = None
    overwrite: bool = False
    recording_dir: Path | None = None
    is_ci: bool = False
    json_path: Path | None = None
    html_path: Path | None = None
    run_stored_code: bool = False
    takes_foreign: bool | None = None


def run_align(
    *,
    config_name: str,
    config_path: Path,
    overrides: Sequence[str],
    options: AlignOptions,
    make_launch: MakeLaunch | None = None,
    console: Console | None = None,
) -> int:
    """Run an alignment, print its report, and return the exit code of the gravest verdict.

    ``{output_dir}/align.json`` holds the result, saved anew after every stage, so an interrupt loses none, and
    ``align.html`` shows it. An earlier alignment's runs in the same folder are taken again where a new run would be the
    same. Raises ``ConfigError`` before anything runs, and ``AlignmentError`` where the baseline fails. ``console``:
    ``None`` is this terminal.
    """
    console = console or build_console()
    _check_writable(options)
    view = view_alignment(
        AlignmentOrder(
            config_name=config_name,
            config_path=config_path,
            overrides=overrides,
            output_dir=options.output_dir,
            recording_dir=options.recording_dir,
            overwrite=options.overwrite,
            console=console,
            make_launch=make_launch,
            run_stored_code=options.run_stored_code,
            takes_foreign=options.takes_foreign,
        )
    )
    files = _write_copies(view, options)
    if options.is_ci:
        summary = alignment_summary(view, files=files)
        for line in summary.split("\n"):
            console.print(line, highlight=False, soft_wrap=True)
    else:
        print_report(view, console, files=files)
    return view.exit_code


def _check_writable(options: AlignOptions) -> None:
    """Raise ``ConfigError`` for a copy that could not be written, before hours are spent on its content."""
    for name, path in (("--json", options.json_path), ("--html", options.html_path)):
        if path is None:
            continue
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(
                f"{name}: the command cannot write {path}; name a file in a folder that exists and is writable"
            )


def _write_copies(view: AlignmentView, options: AlignOptions) -> dict[str, Path]:
    """Write the reports beside result and page; returns where everything lies."""
    folder = Path(view.output_dir)
    files = {
        "page": folder / PAGE_FILE,
        "result": folder / ALIGN_FILE,
        **({"recording": options.recording_dir or Path(view.recording_dir)} if view.recording_dir else {}),
        "runs": folder / "{name}" / LOG_FILE,
    }
    if options.html_path is not None:
        files["HTML copy"] = options.html_path
        write_alignment_page(view, options.html_path)
    if options.json_path is not None:
        files["JSON copy"] = options.json_path
        _copy(folder / ALIGN_FILE, options.json_path)
    if options.is_ci:
        files["junit"] = folder / JUNIT_FILE
        write_junit(view, files["junit"])
    return files


def _copy(path: Path, copy: Path) -> None:
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    except OSError as error:
        raise UnwrittenError(f"{copy} cannot be written: {error.strerror or error}") from error
