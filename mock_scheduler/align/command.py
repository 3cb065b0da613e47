"""``mock-scheduler align``: plan, run, compare, report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from mock_scheduler.align.execution import MakeLaunch, make_process_launch
from mock_scheduler.align.folder import ALIGN_MARKER, prepare_folder
from mock_scheduler.align.plan import build_loader, plan_alignment
from mock_scheduler.align.runs import run_alignment
from mock_scheduler.compare.verdict import worst_exit_code
from mock_scheduler.report.json_file import save_result
from mock_scheduler.report.terminal import build_console, print_report
from mock_scheduler.run_files import ALIGN_FILE, LOG_FILE


def run_align(
    *,
    config_name: str,
    config_path: Path,
    overrides: Sequence[str],
    output_dir: Path | None,
    overwrite: bool,
    json_path: Path | None,
    make_launch: MakeLaunch = make_process_launch,
    console: Console | None = None,
) -> int:
    """Run an alignment, print its report, and return the exit code of the gravest verdict.

    ``{output_dir}/align.json`` holds the result, saved anew after every run, so that an interrupt loses none; a copy
    of the whole goes to ``json_path``. Raises ``ConfigError`` before anything runs, and ``AlignmentError`` where the
    baseline fails. ``console``: ``None`` is this terminal.
    """
    console = console or build_console()
    load = build_loader(config_name, config_path)
    plan = plan_alignment(load, overrides=overrides, output_dir=output_dir)
    prepare_folder(plan.output_dir, marker=ALIGN_MARKER, overwrite=overwrite)
    launch = make_launch(config_name, config_path)
    result_path = plan.output_dir / ALIGN_FILE
    save = partial(save_result, path=result_path)
    result = run_alignment(plan, config_name=config_name, launch=launch, save=save, console=console)
    files = {
        "result": result_path,
        "recording": plan.recording_dir,
        "runs": plan.output_dir / "{name}" / LOG_FILE,
    }
    print_report(result, console, files=files)
    if json_path is not None:
        save_result(result, json_path)
    return worst_exit_code([candidate.alignment.verdict for candidate in result.candidates])
