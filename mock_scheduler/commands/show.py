"""``mock-scheduler show``: prints one recorded trajectory."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mock_scheduler.commands.common import recorded_vocabulary
from mock_scheduler.display.console import build_console
from mock_scheduler.errors import ExitCode, StepNotFoundError
from mock_scheduler.recording.inspection.vocabulary import Vocabulary
from mock_scheduler.recording.paths import format_present, step_folder
from mock_scheduler.recording.reading.browse import StepPlace, list_recording, open_place
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.report.recording.show import find_row, print_trajectory
from mock_scheduler.scheduler import Mode


def run_show(
    dump_dir: str,
    *,
    step: int,
    row: str,
    mode: Mode,
    scheduler_id: str,
    vocabulary_path: Path | None,
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
    where = f"{dump_dir}: {place}"
    print_trajectory(
        batch, find_row(batch, row, where=where), console or build_console(), where=where, vocabulary=vocabulary
    )
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
