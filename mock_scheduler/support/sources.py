"""Digests of the sources that a run computes by."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from mock_scheduler.support.digests import JSON

_SUFFIXES = (".py", ".c", ".h")
#: A file that has changed within this time may change again at the same time stamp.
_UNSETTLED_NS = 2_000_000_000

#: By path: what the file system said of a file before it was read, and its digest.
_known: dict[str, tuple[tuple[int, ...], str]] = {}


def digest_sources(folders: Iterable[Path], files: Sequence[Path] = ()) -> dict[str, JSON]:
    """Computes the SHA-256 (hex) of every file of Python or C below the folders by its path, and of further files by
    name.

    Files with one name have all their digests there, in the order of the folders. A file that the file system says has
    not changed is read once in a process.
    """
    digests: dict[str, list[str]] = {}
    for folder in folders:
        start = len(str(folder)) - len(folder.name)
        for place, _, names in os.walk(folder):
            for name in names:
                if name.endswith(_SUFFIXES):
                    path = f"{place}/{name}"
                    digests.setdefault(path[start:], []).append(_digest(path))
    for file in files:
        digests.setdefault(file.name, []).append(_digest(str(file)))
    return {name: " ".join(digests[name]) for name in sorted(digests)}


def _digest(path: str) -> str:
    state = os.stat(path)
    key = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    found = _known.get(path)
    if found is not None and found[0] == key:
        return found[1]
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    if time.time_ns() - state.st_ctime_ns > _UNSETTLED_NS:
        _known[path] = (key, digest)
    return digest
