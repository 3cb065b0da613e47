"""``mock-scheduler extract``: makes a small folder of a diverged candidate, to show the divergence by one command."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mock_scheduler.alignment.extract.command import CommandExtraction, is_of_command, read_diverged_command
from mock_scheduler.alignment.extract.entry import find_entry_files
from mock_scheduler.alignment.extract.extraction import CheckReproduction, Extraction, run_reproduction
from mock_scheduler.alignment.extract.folder import SCRIPT_FILE, choose_weights, needed_flag
from mock_scheduler.alignment.extract.source import read_diverged
from mock_scheduler.config.stored_code import Use
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import build_console, print_lines
from mock_scheduler.errors import ConfigError, ExitCode
from mock_scheduler.recording.writing.subset import load_train_step
from mock_scheduler.support.documents import write_json
from mock_scheduler.support.text import format_bytes


def run_extract(
    align_dir: Path,
    name: str,
    *,
    output: Path,
    step: int | None = None,
    num_groups: int | None = None,
    is_checked: bool = True,
    check: CheckReproduction | None = None,
    console: Console | None = None,
    run_stored_code: bool = False,
    json_path: Path | None = None,
) -> int:
    """Make the folder ``output`` out of the diverged candidate ``name`` of the alignment in ``align_dir``; 0.

    step: the one to reproduce; ``None`` is that of the first divergence. num_groups: how many to begin with.
    check: ``None`` runs the folder's own script. console: ``None`` is this terminal. run_stored_code: the alignment's
    configuration may name code to run or to copy, and files elsewhere. json_path: a file for folder, size and command.
    Of an alignment of a command there are no groups: its steps up to the divergence are kept.
    Raises ``ConfigError`` where the folder is no alignment's, the candidate has not diverged, or ``output`` is taken;
    ``RecordingError`` where the recording is gone or lacks the step; ``AlignmentError`` where the divergence does not
    show with all groups either, or the script does not run. Then there is no ``output``.
    """
    console = console or build_console()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} exists and is not empty; choose another --output")
    # Unchecked, nothing is started: only what is imported or copied must be asked for.
    use = Use.ALIGN if is_checked else Use.LOAD
    if is_of_command(align_dir):
        if num_groups is not None:
            raise ConfigError("--groups cuts recorded rollouts, and a command reads its own rows: leave it out")
        command = read_diverged_command(align_dir, name, step=step, use=use, run_stored_code=run_stored_code)
        print_lines(console, command.used)
        how = _choose_check(check, is_trusted=command.is_trusted) if is_checked else None
        make = CommandExtraction(source=command, check=how, console=console).make
        return _publish(output, make, console, json_path=json_path)
    source = read_diverged(align_dir, name, step=step, use=use, run_stored_code=run_stored_code)
    print_lines(console, source.used)
    extraction = Extraction(
        source=source,
        batch=load_train_step(source.reader, source.step),
        weights=choose_weights(source),
        entries=tuple(
            find_entry_files(entry, source.own_packages)
            for entry in dict.fromkeys((source.baseline_entry, source.candidate_entry))
        ),
        check=_choose_check(check, is_trusted=source.is_trusted) if is_checked else None,
        console=console,
    )
    return _publish(output, lambda folder: extraction.make(folder, num_groups), console, json_path=json_path)


def _choose_check(check: CheckReproduction | None, *, is_trusted: bool) -> CheckReproduction:
    return check or partial(run_reproduction, run_stored_code=is_trusted)


def _publish(output: Path, make: Callable[[Path], None], console: Console, *, json_path: Path | None) -> int:
    """Makes the folder aside, and gives it its name where it is whole."""
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent))
    try:
        make(aside / output.name)
        (aside / output.name).replace(output)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    size_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    command = f"bash {output / SCRIPT_FILE}{needed_flag(output)}"
    console.print(f"{output}: {format_bytes(size_bytes)}. Show it with: {command}")
    write_json(
        {"format_version": 1, "folder": str(output), "size_bytes": size_bytes, "command": command},
        None if json_path is None else str(json_path),
    )
    return int(ExitCode.ALIGNED)
