"""Installs carried wheels where their distributions lack; parts of wheels are joined first.

A wheel too large to carry lies there in parts, ``NAME.whl.part000`` and on, as ``split -b 64M -d -a 3 NAME.whl
NAME.whl.part`` writes them. Nothing is fetched, and nothing that is installed is replaced: torch stays as it is.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PART = re.compile(r"(?P<name>.+\.whl)\.part(?P<number>\d{3})")
_WHEEL = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._]*)-(?P<version>[^-]+)(-\d[^-]*)?-(?P<tags>[^-]+-[^-]+-[^-]+)\.whl"
)
_PIP_TIMEOUT_S = 300.0


class WheelError(Exception):
    """Wheels that cannot be used; the message says which, why, and what to do."""


def join_parts(folder: Path, target: Path) -> list[Path]:
    """Lists the wheels of a folder; joins the ones in parts, in ``target``.

    Raises:
        WheelError: A part is missing, or the folder is none.
    """
    if not folder.is_dir():
        raise WheelError(f"--wheels {folder} is no folder; name the folder that holds the wheels")
    wheels = sorted(folder.glob("*.whl"))
    parts: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        found = _PART.fullmatch(path.name)
        if found is not None:
            parts.setdefault(found["name"], {})[int(found["number"])] = path
    for name, numbered in parts.items():
        missing = [number for number in range(max(numbered) + 1) if number not in numbered]
        if missing:
            raise WheelError(f"{folder}: {name} lacks part {missing[0]:03d} of {max(numbered) + 1}; carry it too")
        target.mkdir(parents=True, exist_ok=True)
        with (target / name).open("wb") as whole:
            for number in sorted(numbered):
                whole.write(numbered[number].read_bytes())
        wheels.append(target / name)
    if not wheels:
        raise WheelError(f"--wheels {folder} holds no wheel (*.whl, or *.whl.part000 and on)")
    return wheels


def check_wheel(path: Path) -> str:
    """Returns the distribution that a wheel holds.

    Raises:
        WheelError: Its name is no wheel's, or its content is damaged.
    """
    named = _WHEEL.fullmatch(path.name)
    if named is None:
        raise WheelError(f"{path} is not named as a wheel is (NAME-VERSION-PYTHON-ABI-PLATFORM.whl)")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            has_metadata = any(name.endswith(".dist-info/METADATA") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise WheelError(f"{path} is a broken wheel: {error}; copy it again") from error
    if damaged is not None or not has_metadata:
        what = f"{damaged} in it is damaged" if damaged else "it holds no METADATA"
        raise WheelError(f"{path} is a broken wheel: {what}; copy it again")
    return named["name"].replace("_", "-").lower()


def choose_lacking(wheels: Sequence[Path]) -> list[Path]:
    """Lists the wheels whose distributions this Python lacks, after checking all of them."""
    return [path for path in wheels if not _is_installed(check_wheel(path))]


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def install(wheels: Sequence[Path], target: Path) -> None:
    """Installs wheels into a folder, for ``PYTHONPATH``.

    Raises:
        WheelError: pip refused them, as for another Python; its own words are in the message.
    """
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--disable-pip-version-check"]
    command += ["--quiet", "--upgrade", "--target", str(target), *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PIP_TIMEOUT_S)
    if done.returncode:
        raise WheelError(f"pip cannot install the carried wheels: {done.stderr.strip() or done.stdout.strip()}")
