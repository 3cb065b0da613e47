"""Looks at the folder from which torch loads compiled kernels: it must be this user's.

torch (2.13) keeps them in ``torchinductor_USER`` of the folder for temporary files, and loads what lies there, whoever
made the folder. Any user of the machine can make it first.

Contract: standard library only. A folder that the user names (``TORCHINDUCTOR_CACHE_DIR``) is the user's to choose.
"""

from __future__ import annotations

import getpass
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
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        problem = _describe_problem(folder.lstat())
    except OSError:
        return  # torch says what is wrong, where it needs the folder
    else:
        return
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
    return "can be written by every user" if found.st_mode & stat.S_IWOTH else ""


def _user() -> str:
    """Names the user as torch does."""
    try:
        name = getpass.getuser()
    except (KeyError, ImportError, OSError):
        name = f"uid_{os.getuid()}"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
