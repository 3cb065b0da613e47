"""The commands that describe recordings: ``inspect`` tells what is in one, ``verify`` checks all of it.

Contract: recordings are only read; ``--json -`` prints JSON in place of the text. Neither imports torch.
"""

from __future__ import annotations

from mock_scheduler.config.steps import parse_steps
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import build_console, show_progress
from mock_scheduler.errors import ExitCode
from mock_scheduler.recording.inspection.description import describe_recording
from mock_scheduler.recording.inspection.verification import verify_recording
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.report.recording.description import print_description, print_verification
from mock_scheduler.support.documents import STDOUT, dataclass_to_json, write_json

#: The format of the JSON of ``inspect``, ``verify`` and ``diff``.
FORMAT_VERSION = 1


def run_inspect(dump_dir: str, *, steps: str | None, json_path: str | None, console: Console | None = None) -> int:
    """Describe a recording; 5 where a step of it could not be read. ``console``: ``None`` is this terminal."""
    reader = RecordingReader(dump_dir)
    with show_progress("reading steps") as on_step:
        description = describe_recording(reader, parse_steps(steps), on_step=on_step)
    if json_path != STDOUT:
        print_description(description, console or build_console())
    write_json({"format_version": FORMAT_VERSION, **dataclass_to_json(description)}, json_path)
    return int(ExitCode.USAGE if description.problems else ExitCode.ALIGNED)


def run_verify(dump_dir: str, *, steps: str | None, json_path: str | None, console: Console | None = None) -> int:
    """Verify a recording; 5 where anything in it is not as it was written."""
    with show_progress("verifying steps") as on_step:
        result = verify_recording(dump_dir, parse_steps(steps), on_step=on_step)
    if json_path != STDOUT:
        print_verification(result, console or build_console())
    value = {"format_version": FORMAT_VERSION, "is_whole": result.is_whole, **dataclass_to_json(result)}
    write_json(value, json_path)
    return int(ExitCode.ALIGNED if result.is_whole else ExitCode.USAGE)
