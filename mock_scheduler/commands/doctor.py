"""``mock-scheduler doctor``: runs one step twice, in fresh processes, and finds their first difference.

Rollouts are replayed from a recording; a program without any, such as a command, is run twice as it stands, and its
replicas are compared too: where they disagree in runs that repeat themselves, the exit code is 1.

Contract: exits with 0 only where every operation of every rank, every batch and every metric of the steps was compared
and is bit-identical; with 4 where anything differs or nothing was compared. A failed run is no difference: its own
error is shown and its exit code is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mock_scheduler.alignment.executors.local import make_separate_launch
from mock_scheduler.alignment.executors.protocol import LaunchRun, MakeLaunch
from mock_scheduler.alignment.runs.execution import execute_run, failed_run_error
from mock_scheduler.config.stored_code import Use
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import build_console, print_lines
from mock_scheduler.doctor.diagnosis import diagnose
from mock_scheduler.doctor.plan import DoctorPlan, plan_doctor
from mock_scheduler.doctor.view import diagnosis_to_json, print_diagnosis
from mock_scheduler.errors import ExitCode
from mock_scheduler.program import check_stored_code, find_program
from mock_scheduler.report.comparison.text import print_replicas
from mock_scheduler.report.json_file import replicas_to_json
from mock_scheduler.run_folder.command_folder import DOCTOR_MARKER, claim_folder, prepare_folder
from mock_scheduler.run_folder.finished_run import RunFailure
from mock_scheduler.support.files import save_json
from mock_scheduler.support.run_files import DOCTOR_FILE, TRACE_FOLDER
from mock_scheduler.verdict.replicas import check_replicas_at
from mock_scheduler.verdict.results import ReplicaResult


def run_doctor(
    config_name: str,
    *,
    config_path: Path,
    overrides: Sequence[str],
    output_dir: Path | None,
    step: int = 0,
    recording: Path | None = None,
    entry: str | None = None,
    json_path: Path | None = None,
    make_launch: MakeLaunch = make_separate_launch,
    console: Console | None = None,
    run_stored_code: bool = False,
) -> int:
    """Replays the steps 0 to ``step`` twice, prints where they differ and why, and returns the exit code.

    The arguments are ``plan_doctor``'s; ``entry`` is the module to run the replays; ``run_stored_code``: also run the
    code that a stored configuration names. ``{output_dir}/doctor`` is made anew and holds the runs and ``doctor.json``;
    ``json_path`` gets a copy of the latter.
    Raises ``ConfigError`` before anything runs; ``AlignmentError``, with the run's exit code, where a run fails.
    """
    console = console or build_console()
    # Its runs leave the whole configuration marked as the user's own, an alignment's part too.
    told = check_stored_code(config_name, config_path, use=Use.ALIGN, run_stored_code=run_stored_code)
    print_lines(console, told)
    program = find_program(config_name, config_path)
    plan = plan_doctor(
        program.build_loader(config_name, config_path),
        program=program,
        overrides=overrides,
        output_dir=output_dir,
        step=step,
        recording=recording,
        entry=entry,
    )
    keep = None if plan.recorder else plan.recording_dir
    with claim_folder(plan.output_dir, marker=DOCTOR_MARKER):
        prepare_folder(plan.output_dir, marker=DOCTOR_MARKER, overwrite=True, keep=keep)
        _run_all(plan, make_launch(config_name, config_path), console)
        with console.status("comparing operations"):
            diagnosis = diagnose(*(run.output_dir for run in plan.replays), step=step)
        print_diagnosis(diagnosis, console)
        replicas = _check_replicas(plan, console)
        content = {
            "layout": plan.replays[0].layout,
            "recording_dir": None if plan.recording_dir is None else str(plan.recording_dir),
            "replicas": None if replicas is None else replicas_to_json(replicas),
            **diagnosis_to_json(diagnosis),
        }
        for path in (plan.output_dir / DOCTOR_FILE, *([json_path] if json_path else [])):
            save_json(path, content, sort_keys=False)
            console.print(f"result       {path}", highlight=False, soft_wrap=True)
        is_torn = replicas is not None and replicas.exit_code is ExitCode.DIVERGED
        return int(ExitCode.DIVERGED if is_torn and diagnosis.exit_code is ExitCode.ALIGNED else diagnosis.exit_code)


def _run_all(plan: DoctorPlan, launch: LaunchRun, console: Console) -> None:
    """Run what was planned; raises ``AlignmentError`` where a run fails."""
    for line in plan.describe().split("\n"):
        console.print(line, highlight=False)
    for run in plan.runs:
        outcome = execute_run(run, launch=launch, console=console)
        if isinstance(outcome, RunFailure):
            raise failed_run_error(f"the {run.name} run", run, outcome, consequence="nothing was compared")


def _check_replicas(plan: DoctorPlan, console: Console) -> ReplicaResult | None:
    """Check the copies within the first run; ``None`` where it has one process, or traced nothing."""
    first = plan.replays[0]
    if first.config.parallel.world_size == 1 or not (first.output_dir / TRACE_FOLDER).is_dir():
        return None
    result = check_replicas_at(first.output_dir)
    console.print()
    print_replicas(result, console, files={})
    return result
