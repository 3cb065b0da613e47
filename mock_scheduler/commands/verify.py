"""``mock-scheduler verify``: reads all of a recording and checks every digest."""

from __future__ import annotations

from rich.console import Console

from mock_scheduler.commands.common import FORMAT_VERSION, STDOUT, parse_steps, write_json
from mock_scheduler.display.console import build_console
from mock_scheduler.display.json_values import dataclass_to_json
from mock_scheduler.display.progress_bar import show_progress
from mock_scheduler.errors import ExitCode
from mock_scheduler.recording.inspection.verification import verify_recording
from mock_scheduler.report.recording.verify import print_verification


def run_verify(dump_dir: str, *, steps: str | None, json_path: str | None, console: Console | None = None) -> int:
    """Verify a recording; 5 where anything in it is not as it was written."""
    with show_progress("verifying steps") as on_step:
        result = verify_recording(dump_dir, parse_steps(steps), on_step=on_step)
    if json_path != STDOUT:
        print_verification(result, console or build_console())
    value = {"format_version": FORMAT_VERSION, "is_whole": result.is_whole, **dataclass_to_json(result)}
    write_json(value, json_path)
    return int(ExitCode.ALIGNED if result.is_whole else ExitCode.USAGE)
