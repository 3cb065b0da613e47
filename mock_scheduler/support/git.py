"""Asks git about a folder that may be anybody's, and runs nothing that its repository names.

``git status`` runs programs of the repository's own settings: a monitor of files, filters, hooks, and transports to
fetch objects that are missing. A working directory may be a folder that somebody sent, with a repository in it.

Contract: standard library only. Settings of the user and of the machine count; of a repository's, none that names a
program does. A file behind a filter of the repository's own is then compared as it lies there.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

_SAFE = ("core.fsmonitor=false", f"core.hooksPath={os.devnull}", "safe.bareRepository=explicit")
_ENVIRONMENT = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
# Scopes that the repository decides; git knows filters by any name.
_FOREIGN_SCOPES = ("local", "worktree")
_FILTER = re.compile(r"filter\..*\.(clean|smudge|process|required)", re.IGNORECASE | re.DOTALL)
_COUNT = "GIT_CONFIG_COUNT"
_TIMEOUT_S = 10


class Repository:
    """A folder to ask git about; its settings are looked at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = _run(folder, ("config", "--list", "--name-only", "--show-scope", "-z"), {})
        self._settings = None if listed is None else _without_filters(_list_foreign_filters(listed), os.environ)

    def ask(self, *arguments: str) -> str | None:
        """Returns what git says; ``None`` without git, and where it fails."""
        answer = None if self._settings is None else _run(self._folder, arguments, self._settings)
        return None if answer is None else answer.strip()


def _list_foreign_filters(listed: str) -> Iterator[str]:
    fields = listed.split("\0")
    for scope, name in zip(fields[::2], fields[1::2], strict=False):
        if scope in _FOREIGN_SCOPES and _FILTER.fullmatch(name):
            yield name


def _without_filters(names: Iterator[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Settings in the environment have the last word; unlike those of ``-c`` they may have any name."""
    stated = environ.get(_COUNT, "0")
    count = int(stated) if stated.isdecimal() else 0
    settings: dict[str, str] = {}
    for name in dict.fromkeys(names):
        settings |= {f"GIT_CONFIG_KEY_{count}": name, f"GIT_CONFIG_VALUE_{count}": ""}
        count += 1
    return {**settings, _COUNT: str(count)} if settings else {}


def _run(folder: Path, arguments: tuple[str, ...], settings: Mapping[str, str]) -> str | None:
    options = [word for setting in _SAFE for word in ("-c", setting)]
    try:
        result = subprocess.run(
            ["git", *options, *arguments],
            cwd=folder,
            env={**os.environ, **_ENVIRONMENT, **settings},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout
