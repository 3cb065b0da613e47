"""Looks at the folder from which torch loads compiled kernels: it must be this user's.

torch (2.13) keeps them in ``torchinductor_USER`` of the folder for temporary files, and loads what lies there, whoever
made the folder. Any user of the machine can make it first.

Contract: standard library only. A folder that the user names (``TORCHINDUCTOR_CACHE_DIR``) is the user's to choose.
"""

from __future__ import annotations

import getpass
import grp
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mock_scheduler.errors import ConfigError

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def claim_kernel_cache(environ: Mapping[str, str]) -> None:
    """Makes torch's folder of compiled kernels, for this user alone, where there is none.

    Raises:
        ConfigError: it is there, and another user made it or can write in it.
    """
    if environ.get(_VARIABLE):
        return
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
    problem = _describe_parent(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        problem = problem or _describe_problem(folder.lstat())
    except OSError:
        return  # torch says what is wrong, where it needs the folder
    if problem:
        raise ConfigError(
            f"{folder}, from which torch loads compiled kernels, {problem}, so others decide what code runs; remove "
            f"it, or set {_VARIABLE} in your shell to a folder of your own"
        )


def _describe_problem(found: os.stat_result) -> str:
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    if found.st_uid != os.geteuid():
        return f"belongs to the user {found.st_uid}"
    if found.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    return "can be written by its group" if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid) else ""


def _describe_parent(folder: Path) -> str:
    """Whoever may rename what lies in a folder can put another one in its place."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return ""
    is_open = mode & stat.S_IWOTH and not mode & stat.S_ISVTX
    return "lies where every user can put another one in its place" if is_open else ""


def _is_own_group(group_id: int) -> bool:
    """Says whether it is a group of this user alone, as many systems make one of the user's name for each."""
    try:
        group = grp.getgrgid(group_id)
    except KeyError:
        return False
    user = _user()
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _user() -> str:
    """Names the user as torch does."""
    try:
        name = getpass.getuser()
    except (KeyError, ImportError, OSError):
        name = f"uid_{os.getuid()}"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
