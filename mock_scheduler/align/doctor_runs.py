"""``mock-scheduler doctor``: one recorded step replayed twice, in fresh processes, and where they first differ.

Contract: exits with 0 only where every operation of every rank, every batch and every metric of the steps was compared
and is bit-identical; 4 where anything differs or nothing was compared. A run that failed is no difference: its own
error is shown and its exit code is returned.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from mock_scheduler.align.command import MakeLaunch, make_process_launch
from mock_scheduler.align.diagnosis import diagnose
from mock_scheduler.align.doctor_plan import plan_doctor
from mock_scheduler.align.plan import PlannedRun
from mock_scheduler.align.runs import LaunchRun, RunFailure, describe_failure
from mock_scheduler.config.loading import load_config
from mock_scheduler.config.schema import PipelineConfig
from mock_scheduler.errors import AlignmentError, ConfigError, ExitCode
from mock_scheduler.files import save_json
from mock_scheduler.launcher import DEFAULT_ENTRY
from mock_scheduler.report.doctor_view import diagnosis_to_json, print_diagnosis
from mock_scheduler.report.terminal import build_console

RESULT_NAME = "doctor.json"
_MARKER_NAME = ".mock-scheduler-doctor"


def run_doctor(
    config_name: str,
    *,
    config_path: Path,
    overrides: Sequence[str],
    output_dir: Path | None,
    step: int = 0,
    recording: Path | None = None,
    entry: str = DEFAULT_ENTRY,
    json_path: Path | None = None,
    make_launch: MakeLaunch = make_process_launch,
    console: Console | None = None,
) -> int:
    """Replay the steps 0 to ``step`` twice, print where they differ and why, and return the exit code.

    As ``plan_doctor`` for the arguments. ``entry``: the module that runs the replays. ``{output_dir}/doctor`` is made
    anew and holds the runs and ``doctor.json``; a copy of that goes to ``json_path``.
    Raises ``ConfigError`` before anything runs; ``AlignmentError``, with the run's exit code, where a run fails.
    """
    console = console or build_console()
    load = partial(_load, config_name, config_path)
    plan = plan_doctor(load, overrides=overrides, output_dir=output_dir, step=step, recording=recording, entry=entry)
    _prepare_folder(plan.output_dir, keep=None if plan.recorder else plan.recording_dir)
    launch = make_launch(config_name, config_path)
    for run in (*([plan.recorder] if plan.recorder else []), *plan.replays):
        _execute(run, launch=launch, console=console)
    with console.status("comparing operations"):
        diagnosis = diagnose(*(run.output_dir for run in plan.replays), step=step)
    print_diagnosis(diagnosis, console)
    content = {
        "layout": plan.replays[0].layout,
        "recording_dir": str(plan.recording_dir),
        **diagnosis_to_json(diagnosis),
    }
    for path in (plan.output_dir / RESULT_NAME, *([json_path] if json_path else [])):
        save_json(path, content, sort_keys=False)
        console.print(f"result       {path}", highlight=False, markup=False, soft_wrap=True)
    return int(diagnosis.exit_code)


def _execute(run: PlannedRun, *, launch: LaunchRun, console: Console) -> None:
    """Carry a run out; raises ``AlignmentError`` with its own error and exit code where it fails."""
    run.output_dir.mkdir(parents=True, exist_ok=True)
    console.print(f"[bold]{escape(run.name)}[/bold]  {run.layout}  {run.config.rollout_mock.effective_mode} …")
    with console.status(f"{escape(run.name)}: steps 0 to {run.config.max_steps - 1} under {run.layout}"):
        exit_code = launch(run)
    if exit_code != 0:
        raise _failure(run, describe_failure(run, exit_code))


def _failure(run: PlannedRun, failure: RunFailure) -> AlignmentError:
    error = AlignmentError(
        f"the {run.name} run failed (exit code {failure.exit_code}), so nothing was compared: {failure.message}\n"
        f"its whole output is in {run.log_path}"
    )
    # 0 and 1 say that runs are aligned or diverged, which nobody has compared.
    error.exit_code = failure.exit_code if failure.exit_code > ExitCode.DIVERGED else ExitCode.INTERNAL
    return error


def _prepare_folder(folder: Path, *, keep: Path | None) -> None:
    """Empty the folder of an earlier doctor, but for ``keep``; ``ConfigError`` where it holds anything else's files."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / _MARKER_NAME).is_file())):
        raise ConfigError(
            f"{folder} exists and was not made by mock-scheduler doctor (no {_MARKER_NAME} in it); choose another "
            "--output-dir"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER_NAME).write_text("made by mock-scheduler doctor, which may remove what is in this folder\n")
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink() and (keep is None or not keep.is_relative_to(entry)):
            shutil.rmtree(entry)


def _load(config_name: str, config_path: Path, overrides: Sequence[str]) -> PipelineConfig:
    return load_config(config_name, config_path=config_path, overrides=overrides)
