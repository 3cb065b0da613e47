"""The folder of an alignment run: made fresh, and only ever removed where an alignment run made it."""

from __future__ import annotations

import shutil
from pathlib import Path

from mock_scheduler.errors import ConfigError

MARKER_NAME = ".mock-scheduler-align"
RESULT_NAME = "align.json"


def prepare_folder(path: Path, *, overwrite: bool) -> None:
    """Make ``path`` an empty folder with the marker of an alignment run in it.

    Raises ``ConfigError`` where it holds anything and ``overwrite`` is not set, or anything that no alignment run
    made: such a folder is never removed.
    """
    if path.exists() or path.is_symlink():
        _clear(path, overwrite=overwrite)
    path.mkdir(parents=True, exist_ok=True)
    (path / MARKER_NAME).write_text("made by mock-scheduler align; --overwrite may remove this folder\n")


def _clear(path: Path, *, overwrite: bool) -> None:
    if path.is_symlink() or not path.is_dir():
        raise ConfigError(f"{path} is not a folder; choose another --output-dir")
    if not any(path.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"{path} exists and is not empty; give --overwrite or choose another --output-dir")
    if not ((path / MARKER_NAME).is_file() or (path / RESULT_NAME).is_file()):
        raise ConfigError(
            f"{path} was not made by an alignment run (no {MARKER_NAME} or {RESULT_NAME} in it), so --overwrite does "
            "not remove it; choose another --output-dir"
        )
    shutil.rmtree(path)
