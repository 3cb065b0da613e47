"""Says of a report when it was made, from which code, and by which command."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from mock_scheduler.recording.manifest import read_folder_revision
from mock_scheduler.report.recording.description import describe_revision
from mock_scheduler.support.command_line import describe_command
from mock_scheduler.support.versions import VERSION


def describe_origin() -> tuple[tuple[str, str], ...]:
    """Return labels and texts: date, revision of the working directory's repository, command; what is unknown lacks."""
    revision = read_folder_revision(Path.cwd())
    code = "" if revision is None else f"{describe_revision(revision, with_root=True)}, "
    rows = (
        ("made", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("revision", f"{code}mock-scheduler {VERSION}"),
        ("command", describe_command()),
    )
    return tuple((label, text) for label, text in rows if text)
