"""``mock-scheduler align``: plan, run, prove, report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from mock_scheduler.align.plan.plan import plan_alignment
from mock_scheduler.align.plan.planned_run import AlignPlan
from mock_scheduler.align.prove.alignment import AlignmentRunner
from mock_scheduler.align.prove.proof_runs import order_reductions
from mock_scheduler.align.runs.execution import LaunchRuns, MakeLaunch, make_process_launch
from mock_scheduler.align.runs.resume import RunCache, open_folder
from mock_scheduler.align.runs.run_store import RunStore
from mock_scheduler.display.console import build_console
from mock_scheduler.errors import ConfigError
from mock_scheduler.program import ConfigLoader, find_program
from mock_scheduler.report.alignment.builder import build_view
from mock_scheduler.report.alignment.ci import alignment_summary, write_junit
from mock_scheduler.report.alignment.page import write_alignment_page
from mock_scheduler.report.alignment.terminal import print_report
from mock_scheduler.report.alignment.view import AlignmentView
from mock_scheduler.report.json_file import save_result
from mock_scheduler.run_folder.command_folder import ALIGN_MARKER, claim_folder
from mock_scheduler.support.run_files import ALIGN_FILE, LOG_FILE
from mock_scheduler.verdict.consequence.figures import CONSEQUENCE_KINDS
from mock_scheduler.verdict.results import AlignmentResult

PAGE_FILE = "align.html"
JUNIT_FILE = "align.junit.xml"


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignOptions:
    """Options of an alignment.

    Attributes:
        output_dir: the folder of all runs and reports; ``None``: the configuration's.
        overwrite: run everything anew.
        recording_dir: a recording to replay in the baseline too; ``None``: the baseline records.
        is_ci: print only a short summary, and write JUnit XML.
        json_path, html_path: further copies of result and page.
    """

    output_dir: Path | None = None
    overwrite: bool = False
    recording_dir: Path | None = None
    is_ci: bool = False
    json_path: Path | None = None
    html_path: Path | None = None


def run_align(
    *,
    config_name: str,
    config_path: Path,
    overrides: Sequence[str],
    options: AlignOptions,
    make_launch: MakeLaunch = make_process_launch,
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
    program = find_program(config_name, config_path)
    load = program.build_loader(config_name, config_path)
    wants_consequence = load(overrides).align.proofs.consequence
    plan = plan_alignment(
        load,
        program=program,
        overrides=overrides,
        output_dir=options.output_dir,
        recording_dir=options.recording_dir,
        trace_kinds=CONSEQUENCE_KINDS if wants_consequence else (),
    )
    plan = order_reductions(plan, load=load)
    with claim_folder(plan.output_dir, marker=ALIGN_MARKER):
        open_folder(plan.output_dir, fresh=options.overwrite)
        launch = make_launch(config_name, config_path)
        return _carry_out(plan, config_name=config_name, load=load, options=options, launch=launch, console=console)


def _carry_out(
    plan: AlignPlan,
    *,
    config_name: str,
    load: ConfigLoader,
    options: AlignOptions,
    launch: LaunchRuns,
    console: Console,
) -> int:
    reports = _Reports(result_path=plan.output_dir / ALIGN_FILE)
    runner = AlignmentRunner(
        plan=plan,
        config_name=config_name,
        load=load,
        store=RunStore(
            launch=launch,
            cache=RunCache(recording_dir=plan.recording_dir),
            console=console,
            share=plan.baseline.config.align.share_processes,
            at_once=plan.baseline.config.align.at_once,
        ),
        save=reports.save,
        console=console,
    )
    result = runner.run()
    files = {
        "page": plan.output_dir / PAGE_FILE,
        "result": reports.result_path,
        "recording": plan.recording_dir,
        "runs": plan.output_dir / "{name}" / LOG_FILE,
    }
    view = reports.view
    assert view is not None  # a result that has ended was saved
    _write_reports(result, view, options, files=files)
    if options.is_ci:
        console.print(alignment_summary(view, files=files), highlight=False, markup=False, soft_wrap=True)
    else:
        print_report(view, console, files=files)
    return int(result.exit_code)


@dataclass(kw_only=True, slots=True)
class _Reports:
    """Saves the result so far. ``view``: of the last result, built once for all reports, since it reads traces."""

    result_path: Path
    view: AlignmentView | None = None

    def save(self, result: AlignmentResult) -> None:
        """Write it to ``result_path``; before its end without the parts read from folders."""
        self.view = build_view(result, is_full=result.times is not None)
        save_result(result, self.view, self.result_path)


def _check_writable(options: AlignOptions) -> None:
    """Raise ``ConfigError`` for a copy that could not be written, before hours are spent on its content."""
    for name, path in (("--json", options.json_path), ("--html", options.html_path)):
        if path is None:
            continue
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"{name}: {path} cannot be written")


def _write_reports(
    result: AlignmentResult, view: AlignmentView, options: AlignOptions, *, files: dict[str, Path]
) -> None:
    """Write all reports but the result itself; adds the copies to ``files``."""
    write_alignment_page(view, files["page"])
    if options.html_path is not None:
        files["HTML copy"] = options.html_path
        write_alignment_page(view, options.html_path)
    if options.json_path is not None:
        files["JSON copy"] = options.json_path
        save_result(result, view, options.json_path)
    if options.is_ci:
        files["junit"] = result.output_dir / JUNIT_FILE
        write_junit(view, files["junit"])
