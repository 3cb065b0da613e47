"""The commands that look at rows of recordings: ``show`` prints one, ``diff`` compares two recordings row by row.

Contract: recordings are only read; ``--json -`` prints JSON in place of the text.
"""

from __future__ import annotations

import os
from pathlib import Path

from mock_scheduler.config.steps import parse_steps
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import build_console, show_progress
from mock_scheduler.errors import ConfigError, ExitCode, StepNotFoundError
from mock_scheduler.recording.inspection.comparison import compare_recordings
from mock_scheduler.recording.inspection.vocabulary import Vocabulary
from mock_scheduler.recording.paths import describe_absent, format_present, step_folder
from mock_scheduler.recording.reading.browse import StepPlace, list_recording, open_place
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.report.recording.diff import differences_to_json, print_differences
from mock_scheduler.report.recording.show import (
    find_row,
    print_trajectory,
    recorded_vocabulary,
    trajectory_to_json,
)
from mock_scheduler.scheduler import Mode
from mock_scheduler.support.documents import STDOUT, write_json


def run_show(
    dump_dir: str,
    *,
    step: int,
    row: str,
    mode: Mode,
    scheduler_id: str,
    vocabulary_path: Path | None,
    json_path: str | None = None,
    console: Console | None = None,
) -> int:
    """Print one trajectory; raises ``StepNotFoundError`` or ``RecordingError`` naming the steps or rows present."""
    reader = RecordingReader(dump_dir)
    place = _find_place(reader, step_folder(mode, scheduler_id), step)
    batch = open_place(reader, place).load()
    if vocabulary_path is not None:
        vocabulary: Vocabulary | None = Vocabulary.load(vocabulary_path)
    else:
        vocabulary = recorded_vocabulary(reader)
    where = f"{reader.dump_dir}: {place}"
    number = find_row(batch, row, where=where)
    if json_path != STDOUT:
        print_trajectory(batch, number, console or build_console(), where=where, vocabulary=vocabulary)
    if json_path is not None:
        write_json(trajectory_to_json(batch, number, where=where, vocabulary=vocabulary), json_path)
    return int(ExitCode.ALIGNED)


def _find_place(reader: RecordingReader, folder: str, step: int) -> StepPlace:
    listings = {listing.folder: listing for listing in list_recording(reader.storage)}
    if folder in listings:
        listings[folder].raise_problems()
        if step in listings[folder].places:
            return listings[folder].places[step]
    present = {name: list(listing.places) for name, listing in listings.items() if listing.places}
    raise StepNotFoundError(
        f"{reader.dump_dir} holds no {folder} step {step}; steps present: {format_present(present)}"
    )


def run_diff(
    dump_dirs: tuple[str, str],
    *,
    steps: str | None,
    limit: int,
    json_path: str | None,
    console: Console | None = None,
) -> int:
    """Compare two recordings: 0 where they are equal, 1 where not, 3 where they have no step in common.

    Raises ``StepNotFoundError`` where neither has any of the chosen steps.
    """
    if os.path.realpath(dump_dirs[0]) == os.path.realpath(dump_dirs[1]):
        raise ConfigError(f"{dump_dirs[0]} and {dump_dirs[1]} are the same recording; give two different ones")
    readers = RecordingReader(dump_dirs[0]), RecordingReader(dump_dirs[1])
    chosen = parse_steps(steps)
    absent = describe_absent(chosen, [(reader.dump_dir, reader.steps()) for reader in readers])
    if absent:
        raise StepNotFoundError(absent)
    with show_progress("comparing steps") as on_step:
        differences = compare_recordings(readers, chosen, limit=limit, on_step=on_step)
    if json_path != STDOUT:
        print_differences(differences, console or build_console())
    write_json(differences_to_json(differences), json_path)
    return int(differences.exit_code)
