"""Digests of the sources that a run computes by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from mock_scheduler.support.digests import JSON

_SUFFIXES = frozenset({".py", ".c", ".h"})


def digest_sources(folders: Iterable[Path], files: Sequence[Path] = ()) -> dict[str, JSON]:
    """Computes the SHA-256 (hex) of every file of Python or C below the folders by its path, and of further files by
    name.

    Files with one name have all their digests there, in the order of the folders.
    """
    found = [
        (path.relative_to(folder.parent).as_posix(), path)
        for folder in folders
        for path in folder.rglob("*.[chp]*")
        if path.suffix in _SUFFIXES
    ]
    digests: dict[str, list[str]] = {}
    for name, path in [*found, *((path.name, path) for path in files)]:
        digests.setdefault(name, []).append(hashlib.sha256(path.read_bytes()).hexdigest())
    return {name: " ".join(digests[name]) for name in sorted(digests)}
