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
_PIP_TIMEOUT_S = 120.0


class WheelError(Exception):
    """Wheels that cannot be used; the message says which, why, and what to do."""


def join_parts(folder: Path, target: Path) -> tuple[list[Path], list[str]]:
    """Lists the wheels of a folder, and which have a part missing; joins the ones in parts, in ``target``.

    Raises:
        WheelError: The folder is none, or holds no wheel.
    """
    if not folder.is_dir():
        raise WheelError(f"--wheels {folder} is no folder; name the folder that holds the wheels")
    wheels = sorted(folder.glob("*.whl"))
    parts: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        found = _PART.fullmatch(path.name)
        if found is not None:
            parts.setdefault(found["name"], {})[int(found["number"])] = path
    problems = []
    for name, numbered in parts.items():
        missing = [number for number in range(max(numbered) + 1) if number not in numbered]
        if missing:
            problems.append(f"{folder}: {name} lacks part {missing[0]:03d} of {max(numbered) + 1}; carry it too")
            continue
        target.mkdir(parents=True, exist_ok=True)
        with (target / name).open("wb") as whole:
            for number in sorted(numbered):
                whole.write(numbered[number].read_bytes())
        wheels.append(target / name)
    if not wheels and not problems:
        raise WheelError(f"--wheels {folder} holds no wheel (*.whl, or *.whl.part000 and on)")
    return wheels, problems


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


def install_lacking(folder: Path, target: Path, *, work: Path) -> list[str]:
    """Installs the wheels of a folder whose distributions this Python lacks into ``target``, for ``PYTHONPATH``.

    Returns what could not be installed, with the reason; the others are. Wheels in parts are joined in ``work``.

    Raises:
        WheelError: The folder is none, or holds no wheel.
    """
    wheels, problems = join_parts(folder, work)
    lacking = []
    for path in wheels:
        try:
            if not _is_installed(check_wheel(path)):
                lacking.append(path)
        except WheelError as error:
            problems.append(str(error))
    if not lacking or not _pip(lacking, target):
        return problems
    # Not one after another into the folder: several wheels share a package, which the next would replace.
    refused = {path: _pip([path], target, "--dry-run") for path in lacking}
    problems += [f"pip cannot install {path.name}: {words}" for path, words in refused.items() if words]
    rest = [path for path, words in refused.items() if not words]
    words = _pip(rest, target) if rest else ""
    return [*problems, f"pip cannot install {', '.join(path.name for path in rest)}: {words}"] if words else problems


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _pip(wheels: Sequence[Path], target: Path, *options: str) -> str:
    """Installs wheels together; returns pip's words where it refused them, as wheels of another Python, else none."""
    # Isolated from the machine's settings, as NVIDIA's image has a file of constraints.
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--no-index", "--no-deps", "--no-compile"]
    command += ["--quiet", "--disable-pip-version-check", "--upgrade", "--target", str(target), *options]
    try:
        done = subprocess.run(
            [*command, *map(str, wheels)], capture_output=True, text=True, check=False, timeout=_PIP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {_PIP_TIMEOUT_S:.0f} s"
    return (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}") if done.returncode else ""
