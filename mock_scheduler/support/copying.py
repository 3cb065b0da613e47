"""Copies folders of foreign origin: no link is followed out of them, and only regular files are read.

Contract: a hard link cannot be told from the file that it names.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.foreign_files import is_inside, open_foreign


def check_inside(path: Path, root: Path) -> None:
    """Raises ``ConfigError`` where a path below ``root`` leads out of it by a link."""
    if not is_inside(path, root):
        raise ConfigError(
            f"{path} leads to {os.path.realpath(path)}, outside {root}: links are not followed out of a folder"
        )


def copy_folder(origin: Path, target: Path, *, root: Path) -> None:
    """Copies a folder's files to a new folder; ``root``: no link may lead out of it.

    A link inside becomes a copy of what it leads to. Raises ``ConfigError`` with the first link out, or the first
    file that is not regular, before anything is copied; ``OSError`` where reading or writing fails.
    """
    files = _list_files(origin, root, seen=frozenset())
    target.mkdir(parents=True)
    for path in files:
        copy = target / path.relative_to(origin)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy_file(path, copy, root=root)


def copy_file(path: Path, copy: Path, *, root: Path) -> None:
    """Copies one regular file; raises ``ForeignFileError`` for another one, and where a link leads out of ``root``."""
    check_inside(path, root)
    with open_foreign(path, inside=root) as source, copy.open("xb") as out:
        shutil.copyfileobj(source, out)


def _list_files(folder: Path, root: Path, *, seen: frozenset[str]) -> list[Path]:
    check_inside(folder, root)
    real = os.path.realpath(folder)
    if real in seen:
        raise ConfigError(f"{folder} leads to {real}, a folder around it: links in a circle are not followed")
    files = []
    for path in sorted(folder.iterdir()):
        check_inside(path, root)
        if path.is_dir():
            files += _list_files(path, root, seen=seen | {real})
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError(f"{path} is not a regular file: it is not copied")
    return files
