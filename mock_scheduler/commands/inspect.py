"""``mock-scheduler inspect``: describes a recording and its steps."""

from __future__ import annotations

from rich.console import Console

from mock_scheduler.commands.common import FORMAT_VERSION, STDOUT, parse_steps, write_json
from mock_scheduler.display.console import build_console
from mock_scheduler.display.json_values import dataclass_to_json
from mock_scheduler.display.progress_bar import show_progress
from mock_scheduler.errors import ExitCode
from mock_scheduler.recording.inspection.description import describe_recording
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.report.recording.view import print_description


def run_inspect(dump_dir: str, *, steps: str | None, json_path: str | None, console: Console | None = None) -> int:
    """Describe a recording; 5 where a step of it could not be read. ``console``: ``None`` is this terminal."""
    reader = RecordingReader(dump_dir)
    with show_progress("reading steps") as on_step:
        description = describe_recording(reader, parse_steps(steps), on_step=on_step)
    if json_path != STDOUT:
        print_description(description, console or build_console())
    write_json({"format_version": FORMAT_VERSION, **dataclass_to_json(description)}, json_path)
    return int(ExitCode.USAGE if description.problems else ExitCode.ALIGNED)
