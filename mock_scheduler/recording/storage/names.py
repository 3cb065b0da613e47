"""Which names a recording's files may have.

Contract: relative, with ``/``; a name that could lead elsewhere is refused before anything is touched.
"""

from __future__ import annotations

from mock_scheduler.errors import RecordingError


def check_name(name: str, *, location: str) -> None:
    """Raise ``RecordingError`` where ``name`` is no plain relative name; ``""`` is the location itself."""
    is_plain = not name or all(part not in ("", ".", "..") for part in name.split("/"))
    if not is_plain or "\\" in name or "\0" in name:
        raise RecordingError(f"{name!r} cannot name a file of the recording {location}: it is not followed")
