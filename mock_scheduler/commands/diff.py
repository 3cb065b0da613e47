"""``mock-scheduler diff``: compares two recordings to the last bit."""

from __future__ import annotations

import os

from rich.console import Console

from mock_scheduler.commands.common import STDOUT, parse_steps, write_json
from mock_scheduler.display.console import build_console
from mock_scheduler.display.progress_bar import show_progress
from mock_scheduler.errors import ConfigError, StepNotFoundError
from mock_scheduler.recording.inspection.comparison import compare_recordings
from mock_scheduler.recording.paths import describe_absent
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.report.recording.diff import differences_to_json, print_differences


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
